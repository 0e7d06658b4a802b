package tenancy

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/secret"
)

// KeyFile holds the secrets that must not be in the database: whoever has only
// a copy of the database can neither check guesses of API keys nor compute owner
// tags or response digests. It is a JSON file of mode 0600. All replicas share
// one; losing it makes every API key useless. It prints as REDACTED.
type KeyFile struct{ k *keys }

// keys is the file. Values are 32 bytes in hexadecimal. Old peppers and digest
// keys stay in the file as long as something refers to them by id; an old token key for as
// long as tokens live after the new one is current everywhere.
type keys struct {
	Version       int               `json:"version"`
	Pepper        string            `json:"pepper"` // id of the pepper for new keys
	Peppers       map[string]string `json:"peppers"`
	Platform      string            `json:"platform"`
	Postgres      string            `json:"postgres"`
	Digest        string            `json:"digest"` // id of the digest key for new receipts
	DigestKeys    map[string]string `json:"digest_keys"`
	Token         string            `json:"token,omitzero"` // id of the key that signs tokens; files of old releases have none
	TokenSeeds    map[string]string `json:"token_keys,omitzero"`
	peppers       map[string][32]byte
	platform      [32]byte
	digestSecrets map[string][32]byte
	tokenSeeds    map[string][32]byte
}

const (
	keyFileVersion = 1
	keyFileMax     = 1 << 20 // bytes; far more than any number of rotations makes
)

// ErrKeyFile means that a key file is there and cannot be used: it is readable
// by others, or not one of ours. Its text has no content of the file.
var ErrKeyFile = errors.New("key file")

// OpenKeyFile loads the file, or makes it with fresh keys where there is none.
// A file of an older release gets the keys that it lacks. Of several processes that start at once
// one makes or changes it and all load the same.
func OpenKeyFile(path string) (KeyFile, error) {
	f, err := LoadKeyFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if f, err = CreateKeyFile(path); errors.Is(err, fs.ErrExist) {
			f, err = LoadKeyFile(path)
		}
	}
	if err != nil || f.k.Token != "" {
		return f, err
	}
	return addTokenKeys(path)
}

// LoadKeyFile reads an existing file and leaves it as it is. The error wraps fs.ErrNotExist where
// there is none, and ErrKeyFile where it must not be trusted.
func LoadKeyFile(path string) (KeyFile, error) {
	file, err := os.Open(path)
	if err != nil {
		return KeyFile{}, fmt.Errorf("open key file: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return KeyFile{}, fmt.Errorf("stat key file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return KeyFile{}, fmt.Errorf("%w %s is not a regular file", ErrKeyFile, path)
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return KeyFile{}, fmt.Errorf("%w %s has mode %#o, so others can read or change it; take that away with chmod 600", ErrKeyFile, path, perm)
	}
	b, err := io.ReadAll(io.LimitReader(file, keyFileMax))
	if err != nil {
		return KeyFile{}, fmt.Errorf("read key file: %w", err)
	}
	var k keys
	// The error of the decoder may quote the file.
	if json.Unmarshal(b, &k) != nil || !k.decode() {
		return KeyFile{}, fmt.Errorf("%w %s is damaged or of a newer version; restore it from a backup", ErrKeyFile, path)
	}
	return KeyFile{&k}, nil
}

// CreateKeyFile makes a file with fresh keys. The error wraps fs.ErrExist where
// there is one. The file appears whole or not at all.
func CreateKeyFile(path string) (KeyFile, error) {
	k := keys{
		Version: keyFileVersion,
		Pepper:  "p1", Peppers: map[string]string{"p1": random32()},
		Platform: random32(), Postgres: random32(),
		Digest: "d1", DigestKeys: map[string]string{"d1": random32()},
		Token: firstTokenKey, TokenSeeds: map[string]string{firstTokenKey: random32()},
	}
	if !k.decode() {
		return KeyFile{}, fmt.Errorf("%w: fresh keys do not load", ErrKeyFile)
	}
	b, err := json.MarshalIndent(&k, "", "  ")
	if err != nil {
		return KeyFile{}, fmt.Errorf("encode key file: %w", err)
	}
	// Unlike a rename, a link fails where the name is taken.
	if err := place(path, b, os.Link); err != nil {
		return KeyFile{}, err
	}
	return KeyFile{&k}, nil
}

// Pepper returns the pepper for new API keys and its id.
func (f KeyFile) Pepper() (string, [32]byte) { return f.k.Pepper, f.k.peppers[f.k.Pepper] }

// PepperByID returns the pepper that an existing key was hashed with.
func (f KeyFile) PepperByID(pepper string) ([32]byte, bool) {
	p, ok := f.k.peppers[pepper]
	return p, ok
}

// PlatformKey is the key of [OwnerTag].
func (f KeyFile) PlatformKey() [32]byte { return f.k.platform }

// PostgresSecret is what the passwords of the database roles are derived from.
func (f KeyFile) PostgresSecret() secret.String { return secret.New(f.k.Postgres) }

// DigestKey derives the key under which digests of a tenant's responses are
// made now, and names it as receipts do.
func (f KeyFile) DigestKey(tenant id.Tenant) (string, [32]byte) {
	key, _ := f.DigestKeyByID(f.k.Digest, tenant)
	return f.k.Digest, key
}

// DigestKeyByID derives the key that a receipt names.
func (f KeyFile) DigestKeyByID(name string, tenant id.Tenant) ([32]byte, bool) {
	s, ok := f.k.digestSecrets[name]
	if !ok {
		return [32]byte{}, false
	}
	m := hmac.New(sha256.New, s[:])
	m.Write([]byte("bulkhead response digest v1\x00"))
	m.Write(tenant[:])
	return [32]byte(m.Sum(nil)), true
}

// TokenKeys returns the seeds of the keys for tokens of the platform by id, and which of them signs. A
// file of an old release that was loaded, not opened, has none.
func (f KeyFile) TokenKeys() (current string, seeds map[string][32]byte) {
	return f.k.Token, maps.Clone(f.k.tokenSeeds)
}

// Format prints REDACTED for every verb.
func (f KeyFile) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte(secret.Redacted)) }

// LogValue implements slog.LogValuer.
func (f KeyFile) LogValue() slog.Value { return slog.StringValue(secret.Redacted) }

// MarshalJSON keeps the keys out of JSON; only CreateKeyFile writes them.
func (f KeyFile) MarshalJSON() ([]byte, error) { return []byte(`"` + secret.Redacted + `"`), nil }

func (k *keys) decode() bool {
	var ok bool
	if k.platform, ok = parse32(k.Platform); !ok || k.Version != keyFileVersion {
		return false
	}
	if _, ok = parse32(k.Postgres); !ok {
		return false
	}
	if k.peppers, ok = parseAll(k.Peppers); !ok {
		return false
	}
	if k.digestSecrets, ok = parseAll(k.DigestKeys); !ok {
		return false
	}
	if k.tokenSeeds, ok = parseAll(k.TokenSeeds); !ok {
		return false
	}
	_, pepper := k.peppers[k.Pepper]
	_, digest := k.digestSecrets[k.Digest]
	_, token := k.tokenSeeds[k.Token]
	return pepper && digest && (token || k.Token == "" && len(k.tokenSeeds) == 0)
}

func parseAll(texts map[string]string) (map[string][32]byte, bool) {
	out := make(map[string][32]byte, len(texts))
	for name, text := range texts {
		v, ok := parse32(text)
		if !ok || name == "" {
			return nil, false
		}
		out[name] = v
	}
	return out, true
}

func parse32(s string) (v [32]byte, ok bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(v) {
		return v, false
	}
	return [32]byte(b), true
}

func random32() string {
	var b [32]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
