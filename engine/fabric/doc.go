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
//	                    out of shared memory, between processes of one user on one host
//
// All pass the suite in package fabrictest, which also has a reader that injects
// faults.
//
// # Shared memory
//
// Within one host decode may read all of prefill's memory: it is inside of
// prefill's boundary of trust for reading, and never for writing. A server whose
// pool is a memfd, sealed against shrinking, growing and new writable mappings,
// offers it to clients over a unix socket. A client asks for it on its stream,
// which is authenticated as ever, and is told a token and the path of a second
// socket, beside the first and like it for one user only. There it shows the
// token, which is good once and while the stream is open, and gets the
// descriptor, opened for reading. Both ends ask the kernel whether the other
// belongs to their own user. The client checks seals and size before it maps the
// memory, for reading and kept out of core dumps.
//
// Pages are then lent. A lend request is checked like a read; if it is good the
// server takes a hold on every page of it (kv.Pool.Lend) and answers where they
// begin. The client copies them through the sink, which digests what it stores,
// and says that it is done. A hold ends in two ways only:
//
//   - the client says done, which it does after its last copy has returned, and
//     waits until the server has let go;
//   - the client's end of the socket is closed. That is proof as well: the code
//     of a client closes it after its copy has returned, never on a context that
//     ends meanwhile; and when a process dies, however it does, the kernel
//     closes its files after the last of its threads has left user space for
//     good.
//
// No timeout ends a hold. A reader that is stopped keeps its pages held, or
// quarantined once they are released; they are never granted to anybody. Nor
// does the server close a connection over which pages are lent, since its own
// closing would prove nothing: when it ends it waits a second, and then gives
// those pages up for good. At most maxLent pages are lent over a connection, in
// one exchange.
//
// Where the memory is not shared, or cannot be, pages come by the stream. A
// client decides that at its first read, and then keeps to it: Client.Transport
// says which it is, Client.WhyNotShared why.
//
// # The stream protocol
//
// Little endian. One exchange after the other on a connection; every message
// begins with "BHKF" version:u16 and the kind of request or the status:
//
//	read    1 transfer:16 secret:32 count:u32 count * ( index:u32 generation:u64 )
//	answer  status pageBytes:u32 count:u32
//	        count * ( status:u16 0:u16 index:u32 generation:u64 page )
//	map     2
//	answer  status memory:16 token:32 size:u64 length:u16 path
//	lend    3 memory:16 and as read
//	answer  status pageBytes:u32 count:u32 count * offset:u64
//	done    4, after the answer to lend
//	answer  status, when nothing is held any more
//
// A status other than 0 ends the exchange; nothing follows it but, in the
// answers to read and lend, zeros in place of size and count. The client checks
// that each page is the one it asked for next and has the size of the memory it
// goes to, and that each offset lies within what it has mapped. A connection is
// used again only after an exchange that ended as it should; every other is
// destroyed.
//
// On the second socket the client sends the token, 32 bytes, and gets one byte
// with the descriptor, or the end of the connection.
package fabric
