// Package peer says who is at the other end of a connection between processes
// of the platform.
//
// Every process has a certificate that one authority issued when it was started,
// with its identity as a URI:
//
//	bulkhead://gateway
//	bulkhead://worker/<role>/<epoch>
//
// Both ends of every connection prove theirs (mutual TLS 1.3). A server knows
// the identity of each caller from the certificate, never from a message; a
// client names the identity that it wants to reach and refuses any other, so an
// address that another process took over is of no use to that process.
//
// The key of the authority exists in memory of the process that supervises the
// others. An epoch that is over has no valid use left: its worker is gone, and
// the registry takes it back from nobody.
package peer
