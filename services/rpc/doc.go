// Package rpc serves the Connect services: inference, tenancy, catalogue and
// audit, with gRPC and gRPC-Web on the same routes, health and reflection.
//
// A key is checked before anything of a message is decompressed or decoded, and
// then the scopes of the procedure (scopes.go has the one table). Errors carry
// the platform's code in the header Bulkhead-Error-Code and, where waiting
// helps, Retry-After.
package rpc
