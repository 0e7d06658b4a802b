package tenancy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// firstTokenKey is the id of the token key that a file begins with.
const firstTokenKey = "t1"

// addTokenKeys gives a file of an older release a token key and loads it. Everything else in the file stays
// as it is, also what this release does not know. The file is at every moment the old one or
// the new one. Of several processes one adds the key: they queue at a lock of the old file, and who finds it
// replaced takes what is there.
func addTokenKeys(path string) (KeyFile, error) {
	path, err := filepath.EvalSymlinks(path) // the file is replaced, not the link to it
	if err != nil {
		return KeyFile{}, fmt.Errorf("find key file: %w", err)
	}
	old, err := os.Open(path)
	if err != nil {
		return KeyFile{}, fmt.Errorf("open key file: %w", err)
	}
	defer old.Close() // which ends the lock
	for {
		if err = unix.Flock(int(old.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return KeyFile{}, fmt.Errorf("lock key file: %w", err)
	}
	f, err := LoadKeyFile(path)
	if err != nil || f.k.Token != "" {
		return f, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return KeyFile{}, fmt.Errorf("read key file: %w", err)
	}
	var all map[string]json.RawMessage
	if json.Unmarshal(text, &all) != nil {
		return KeyFile{}, fmt.Errorf("%w %s changed while it was read", ErrKeyFile, path)
	}
	all["token"], err = json.Marshal(firstTokenKey)
	if err != nil {
		return KeyFile{}, fmt.Errorf("encode key file: %w", err)
	}
	all["token_keys"], err = json.Marshal(map[string]string{firstTokenKey: random32()})
	if err != nil {
		return KeyFile{}, fmt.Errorf("encode key file: %w", err)
	}
	if text, err = json.MarshalIndent(all, "", "  "); err != nil {
		return KeyFile{}, fmt.Errorf("encode key file: %w", err)
	}
	if err := place(path, text, os.Rename); err != nil {
		return KeyFile{}, fmt.Errorf("add \"token\" and \"token_keys\", which this release needs, to the key file: %w", err)
	}
	return LoadKeyFile(path)
}

// place writes a file of mode 0600 beside the path and moves it there, so that it appears whole or
// not at all.
func place(path string, text []byte, move func(from, to string) error) error {
	dir := filepath.Dir(path)
	// CreateTemp opens with O_EXCL and mode 0600.
	tmp, err := os.CreateTemp(dir, ".keys-*")
	if err != nil {
		return fmt.Errorf("create key file: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(append(text, '\n'))
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return fmt.Errorf("write key file: %w", err)
	}
	if err := move(tmp.Name(), path); err != nil {
		return fmt.Errorf("create key file: %w", err)
	}
	if d, err := os.Open(dir); err == nil { // make the name durable, where folders can be synced
		_ = d.Sync()
		_ = d.Close()
	}
	return nil
}
