// Package migrations holds the schema of the platform's database as goose SQL
// files. They run as bulkhead_owner with the search path set to the schema
// bulkhead; pgdb.Migrate makes the roles and the schema first. Everything stays
// within PostgreSQL 15. A migration that has been released is never edited.
package migrations

import "embed"

// FS holds the migrations.
//
//go:embed *.sql
var FS embed.FS
