package pgdb

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// scramIterations is PostgreSQL's own default. The passwords have 256 random
// bits, which no number of iterations would make safer.
const scramIterations = 4096

// ErrRights means that the user of the connection string may not do what
// setting up the database needs.
var ErrRights = errors.New("the database user may not create roles and schemas; give it CREATEROLE, and CREATE on the database, or have an administrator run the migration once")

// errNoSecret means a programming error: no password could be derived.
var errNoSecret = errors.New("no secret to derive database passwords from")

// rolePassword derives the password of a role, so that every replica knows it
// and it is written down nowhere.
func (src Source) rolePassword(role Role) (string, error) {
	if src.RoleSecret.IsZero() {
		return "", errNoSecret
	}
	return hex.EncodeToString(src.derive("bulkhead database role v1", role)), nil
}

func (src Source) derive(label string, role Role) []byte {
	m := hmac.New(sha256.New, []byte(src.RoleSecret.Reveal()))
	fmt.Fprintf(m, "%s\x00%s", label, role)
	return m.Sum(nil)
}

// verifier is what the server stores of a password (RFC 5803). It is computed
// here, so the password itself is in no statement. The salt is derived too: all
// replicas write the same verifier.
func (src Source) verifier(role Role) (string, error) {
	password, err := src.rolePassword(role)
	if err != nil {
		return "", err
	}
	salt := src.derive("bulkhead database salt v1", role)[:16]
	salted, err := pbkdf2.Key(sha256.New, password, salt, scramIterations, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("derive verifier: %w", err)
	}
	mac := func(text string) []byte {
		m := hmac.New(sha256.New, salted)
		m.Write([]byte(text))
		return m.Sum(nil)
	}
	stored := sha256.Sum256(mac("Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", scramIterations, b64(salt), b64(stored[:]), b64(mac("Server Key"))), nil
}

const (
	// roleTries bounds repeated attempts: several replicas that set up roles at once
	// make each other fail, and advisory locks do not reach across databases.
	roleTries = 10
	roleWait  = 30 * time.Millisecond
)

// ensureRoles makes the roles and sets their attributes and passwords.
func (src Source) ensureRoles(ctx context.Context, conn *pgx.Conn) error {
	if err := retryConcurrent(ctx, func() error { return ensureOwner(ctx, conn) }); err != nil {
		return rightsError("create database owner", err)
	}
	for _, role := range loginRoles {
		v, err := src.verifier(role)
		if err != nil {
			return err
		}
		err = retryConcurrent(ctx, func() error {
			exists, err := roleExists(ctx, conn, string(role))
			if err != nil {
				return err
			}
			verb := "CREATE"
			if exists {
				verb = "ALTER"
			}
			// A verifier has no quote, and a role is a constant of ours.
			// NOINHERIT keeps the rights of a role that somebody grants later
			// out of reach; the other attributes are PostgreSQL's defaults.
			_, err = conn.Exec(ctx, fmt.Sprintf("%s ROLE %s LOGIN NOINHERIT PASSWORD '%s'", verb, role, v))
			return err
		})
		if err != nil {
			return rightsError("set up database role", err)
		}
		if err := checkHarmless(ctx, conn, string(role)); err != nil {
			return err
		}
	}
	return nil
}

func ensureOwner(ctx context.Context, conn *pgx.Conn) error {
	exists, err := roleExists(ctx, conn, roleOwner)
	if err != nil {
		return err
	}
	if !exists {
		if _, err := conn.Exec(ctx, "CREATE ROLE "+roleOwner+" NOLOGIN"); err != nil {
			return err
		}
	}
	// From version 16 on a role can be a member and still not be allowed to
	// assume the role; creating a role makes such a member.
	var member bool
	err = conn.QueryRow(ctx, `SELECT pg_has_role(current_user, $1,
		CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END)`, roleOwner).Scan(&member)
	if err != nil || member {
		return err
	}
	_, err = conn.Exec(ctx, "GRANT "+roleOwner+" TO CURRENT_USER")
	return err
}

func roleExists(ctx context.Context, conn *pgx.Conn, role string) (exists bool, err error) {
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", role).Scan(&exists)
	return exists, err
}

// ErrRoleAttributes means that a role of the platform has attributes that would
// defeat the isolation of tenants.
var ErrRoleAttributes = errors.New("a database role of the platform has attributes that would defeat row-level security; drop the role, or ALTER ROLE ... NOSUPERUSER NOBYPASSRLS NOCREATEROLE")

func checkHarmless(ctx context.Context, conn *pgx.Conn, role string) error {
	var harmful bool
	err := conn.QueryRow(ctx, "SELECT rolsuper OR rolbypassrls OR rolcreaterole OR rolcreatedb OR rolreplication FROM pg_roles WHERE rolname = $1", role).Scan(&harmful)
	if err != nil {
		return Wrap("check database role", err)
	}
	if harmful {
		return fmt.Errorf("%w (%s)", ErrRoleAttributes, role)
	}
	return nil
}

// retryConcurrent repeats what failed because somebody else did the same at the
// same moment.
func retryConcurrent(ctx context.Context, fn func() error) error {
	for try := 1; ; try++ {
		err := fn()
		switch State(err) {
		case "42710", StateUniqueViolation, "XX000": // exists already; in the catalogue's index; "tuple concurrently updated"
		default:
			return err
		}
		if try == roleTries {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(roleWait * time.Duration(try)):
		}
	}
}

func rightsError(op string, err error) error {
	if State(err) == "42501" {
		return fmt.Errorf("%w: %w", ErrRights, Wrap(op, err))
	}
	return Wrap(op, err)
}
