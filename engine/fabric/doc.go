// Package fabric moves the bytes of pages from a prefill worker to a decode
// worker.
//
// Decode reads; nobody ever writes the memory of another process. So the
// question when a decode page may be used again has a local answer: when one's
// own read has returned. And the question when a prefill page may be used again
// is answered by the holds of package kv: the server holds a page open exactly
// while it copies it into the connection, and a page that is released
// meanwhile is quarantined until then. A connection that is closed with no
// goroutine serving it is proof that no read is in flight. No timeout ever
// stands for such a proof; timeouts only end exchanges.
//
// # Who may read
//
// An offer is open from Server.Open until Server.Withdraw. A read names the
// transfer, shows the 32-byte range secret of the offer, which only the manifest
// carries, and names pages with their generation. The server refuses a page
// outside of the offer, and a page under another generation. An unknown transfer
// and a wrong secret look the same from outside.
//
// # Implementations
//
//	Server.Local        in process, for tests and single-process set-ups
//	Client <-> Serve    over a stream: unix socket, TCP, or TCP with TLS
//
// Both pass the suite in package fabrictest, which also has a reader that
// injects faults.
//
// # The stream protocol
//
// Little endian. One exchange after the other on a connection:
//
//	read    "BHKF" version:u16 1:u16 transfer:16 secret:32 count:u32
//	        count * ( index:u32 generation:u64 )
//	answer  "BHKF" version:u16 status:u16 pageBytes:u32 count:u32
//	        count * ( status:u16 0:u16 index:u32 generation:u64 page )
//
// A status other than 0 ends the exchange; nothing follows it. The client
// checks that each page is the one it asked for next and has the size of the
// memory it goes to. A connection is used again only after an exchange that
// ended as it should; every other is destroyed.
package fabric
