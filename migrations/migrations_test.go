package migrations_test

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Files are numbered without a gap, and goose can read each of them.
func TestFiles(t *testing.T) {
	t.Parallel()
	files, err := fs.Glob(migrations.FS, "*")
	assert.NoError(t, err)
	name := regexp.MustCompile(`^(\d{5})_[a-z0-9_]+\.sql$`)
	for i, file := range files {
		m := name.FindStringSubmatch(file)
		assert.True(t, m != nil)
		assert.Equal(t, m[1], fmt.Sprintf("%05d", i+1))
		b, err := fs.ReadFile(migrations.FS, file)
		assert.NoError(t, err)
		text := string(b)
		assert.Equal(t, strings.Count(text, "-- +goose Up"), 1)
		// Going back is a restore: a migration that drops data is not kept ready.
		assert.False(t, strings.Contains(text, "+goose Down"))
		assert.Equal(t, strings.Count(text, "-- +goose StatementBegin"), strings.Count(text, "-- +goose StatementEnd"))
	}
	assert.True(t, len(files) > 0)
}

// What holds for every object, whichever migration made it. Each query lists
// the objects that break the rule, and must find the one that is planted.
func TestRulesOfTheCatalogue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ query, plant, finds string }{
		"a function with its owner's rights pins the search path": {
			`SELECT proname::text FROM pg_proc WHERE pronamespace = 'bulkhead'::regnamespace AND prosecdef
				AND NOT coalesce(proconfig::text LIKE '%search_path=bulkhead, pg_temp%', false)`,
			"CREATE FUNCTION loose() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'", "loose"},
		"everything belongs to the owner": {
			`SELECT relname::text FROM pg_class WHERE relnamespace = 'bulkhead'::regnamespace AND relowner <> 'bulkhead_owner'::regrole
				UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace = 'bulkhead'::regnamespace AND proowner <> 'bulkhead_owner'::regrole`,
			"CREATE FUNCTION stray() RETURNS int LANGUAGE sql AS 'SELECT 1'", "stray"},
		"no view runs with its owner's rights": {
			`SELECT relname::text FROM pg_class WHERE relnamespace = 'bulkhead'::regnamespace AND (relkind = 'm'
				OR relkind = 'v' AND NOT coalesce(reloptions::text LIKE '%security_invoker=true%', false))`,
			"CREATE VIEW around AS SELECT * FROM receipt", "around"},
		"times have a zone": {
			`SELECT c.relname || '.' || a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
				WHERE c.relnamespace = 'bulkhead'::regnamespace AND a.atttypid = 'timestamp'::regtype AND c.relname <> 'goose_db_version'`,
			"ALTER TABLE worker ADD local timestamp", "worker.local"},
		"pages of a tenant have an index": {
			`SELECT c.relname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant'
				WHERE c.relnamespace = 'bulkhead'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
				AND c.relname <> 'intent' AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indkey[0] = a.attnum)`,
			"CREATE TABLE slow (tenant uuid)", "slow"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			admin := pgtest.New(t).Admin(t)
			list := func() []string {
				rows, err := admin.Query(t.Context(), c.query)
				assert.NoError(t, err)
				got, err := pgx.CollectRows(rows, pgx.RowTo[string])
				assert.NoError(t, err)
				return got
			}
			if got := list(); len(got) > 0 {
				t.Fatalf("these break the rule: %v", got)
			}
			_, err := admin.Exec(t.Context(), c.plant)
			assert.NoError(t, err)
			assert.Equal(t, list(), []string{c.finds})
		})
	}
}
