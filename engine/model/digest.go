package model

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"
)

// digestPrefix names the hash in the text form of a digest.
const digestPrefix = "sha256:"

// Digest is the SHA-256 of a model file: the identity of a model wherever two
// processes must mean the same one.
type Digest [sha256.Size]byte

// String returns "sha256:" and 64 lower-case hexadecimal digits.
func (d Digest) String() string { return digestPrefix + hex.EncodeToString(d[:]) }

// DigestFile reads the whole file at path and returns its digest.
func DigestFile(path string) (Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return Digest{}, fmt.Errorf("digest model: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return Digest{}, fmt.Errorf("digest model: %w", err)
	}
	return Digest(h.Sum(nil)), nil
}

// ParseDigest is the inverse of Digest.String. It accepts only that form.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	digits, ok := strings.CutPrefix(s, digestPrefix)
	if !ok || len(digits) != hex.EncodedLen(len(d)) || strings.ToLower(digits) != digits {
		return Digest{}, invalid("digest %.80q is not %q and 64 lower-case hexadecimal digits", s, digestPrefix)
	}
	if _, err := hex.Decode(d[:], []byte(digits)); err != nil {
		return Digest{}, invalid("digest %.80q has a character that is not a hexadecimal digit", s)
	}
	return d, nil
}
