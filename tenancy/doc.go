// Package tenancy knows who may use the platform: tenants, their projects and
// API keys, the owner tag under which the engine holds a tenant's pages, and
// the catalogue of models.
//
// # Keys
//
// An API key is "bhk_live_", twelve characters that find the row, "_", 43
// characters of secret and six of CRC-32. A mistyped key fails its checksum and
// never reaches the database. At rest there is an HMAC-SHA-256 of the whole key under a pepper
// that lives in the [KeyFile], never in the database.
//
// # What a check may cost and how old it may be
//
// [Authenticator] remembers the outcome of a check. An outcome younger than half a
// second is used as it is; until one second it is used and renewed in the background;
// after that a caller waits for the renewal. So a revoked key stops within a
// second wherever the database answers. Where it does not, a key that was good stays
// good for ten seconds after its last check, and then callers get 503: an
// outage is never reported as a bad key.
//
// # Isolation
//
// Every method of [Store] that touches a tenant's rows takes the tenant and
// runs in a transaction that row-level security binds to it.
package tenancy
