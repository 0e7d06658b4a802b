package tenancy

import (
	"crypto/rand"
	"hash/crc32"
	"strings"

	"bulkhead.dev/infra/secret"
)

const (
	keyIntro  = "bhk_live_"
	keyPrefix = 12 // base-62 characters that find the row: 71 bits
	keySecret = 43 // base-62 characters of secret: 256 bits
	keyCheck  = 6  // base-62 characters hold a CRC-32
	keyLength = len(keyIntro) + keyPrefix + 1 + keySecret + keyCheck

	base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)

// KeyIntro is how every API key begins, for scanners that look for leaked ones.
const KeyIntro = keyIntro

// newKey makes a fresh key and returns it with its look-up prefix.
func newKey() (key secret.String, prefix string) {
	prefix = randomBase62(keyPrefix)
	body := keyIntro + prefix + "_" + randomBase62(keySecret)
	return secret.New(body + checksum(body)), prefix
}

// parseKey checks the form and the checksum of a key and returns its look-up
// prefix. It says nothing about whether the key exists.
func parseKey(key string) (prefix string, ok bool) {
	if len(key) != keyLength || !strings.HasPrefix(key, keyIntro) {
		return "", false
	}
	body, check := key[:keyLength-keyCheck], key[keyLength-keyCheck:]
	prefix, rest, found := strings.Cut(body[len(keyIntro):], "_")
	if !found || len(prefix) != keyPrefix || !isBase62(prefix) || !isBase62(rest) {
		return "", false
	}
	return prefix, checksum(body) == check
}

// checksum is the CRC-32 (IEEE) of the text before it, in base 62.
func checksum(body string) string {
	v := crc32.ChecksumIEEE([]byte(body))
	var out [keyCheck]byte
	for i := keyCheck - 1; i >= 0; i-- {
		out[i] = base62[v%62]
		v /= 62
	}
	return string(out[:])
}

func isBase62(s string) bool {
	for i := range len(s) {
		if strings.IndexByte(base62, s[i]) < 0 {
			return false
		}
	}
	return true
}

// randomBase62 draws each character evenly: bytes from 248 up are thrown away,
// because 256 is no multiple of 62.
func randomBase62(n int) string {
	out := make([]byte, 0, n)
	var buf [64]byte
	for len(out) < n {
		rand.Read(buf[:])
		for _, b := range buf {
			if b < 248 && len(out) < n {
				out = append(out, base62[b%62])
			}
		}
	}
	return string(out)
}
