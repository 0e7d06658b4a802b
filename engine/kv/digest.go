package kv

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"io"

	"bulkhead.dev/engine/mem"
)

// DigestAlg names a way to digest pages.
type DigestAlg uint16

// GMAC is AES-256-GMAC: AES-GCM with the page as additional data, nothing
// encrypted, and the place of the page as the nonce.
//
// Why: it is a real MAC, in the standard library, and runs at several GB/s
// with the AES and carry-less multiply instructions of any server CPU, close to
// what reading the page costs. Bound: two different pages of n 16-byte blocks
// have equal sums with probability at most (n+1)/2^128 over the key (a page of
// 16 MiB: below 2^-107), provided that no nonce is used twice under a key; the
// nonce holds the index of the page in the sequence, and a key serves one
// transfer. What it does not do: a worker that holds the key can sign any
// bytes. It is proof against accidents, races and tenants, who see neither sums
// nor keys; not against a malicious worker.
const GMAC DigestAlg = 1

// NH is the digest of package mem: almost universal, keyed, and made in the pass
// that moves the bytes. Its bound is stated there. It is what legs of today use;
// GMAC is for those that know nothing else.
const NH DigestAlg = 2

// SumBytes is the size of a page digest.
const SumBytes = 16

// Sum is the keyed digest of one page in its place.
type Sum [SumBytes]byte

// DigestKey is the key for the pages of one transfer. Never use one twice.
type DigestKey struct {
	Alg    DigestAlg
	Secret [32]byte
}

// digester digests pages under one key: the page that is the i-th of its
// sequence and was granted to the offering leg under the generation.
type digester interface {
	sum(i int, generation uint64, page []byte) Sum
	// copySum copies a page and digests what it stores, in one pass where it can.
	copySum(dst, src []byte, i int, generation uint64) Sum
	// readSum fills a page from a stream and digests it.
	readSum(dst []byte, from io.Reader, i int, generation uint64) (Sum, error)
}

func newDigester(k DigestKey) (digester, error) {
	switch k.Alg {
	case NH:
		return nhDigester{mem.NewKey(k.Secret)}, nil
	case GMAC:
		block, err := aes.NewCipher(k.Secret[:])
		if err != nil {
			return nil, fmt.Errorf("make a digest key: %w", err)
		}
		gcm, err := cipher.NewGCM(block)
		if err != nil {
			return nil, fmt.Errorf("make a digest key: %w", err)
		}
		return gmacDigester{gcm}, nil
	}
	return nil, fmt.Errorf("%w: algorithm %d is unknown", ErrDigest, k.Alg)
}

type nhDigester struct{ key *mem.Key }

func (d nhDigester) sum(i int, generation uint64, page []byte) Sum {
	return d.key.Sum(uint32(i), generation, page)
}

func (d nhDigester) copySum(dst, src []byte, i int, generation uint64) Sum {
	return d.key.CopySum(dst, src, uint32(i), generation)
}

func (d nhDigester) readSum(dst []byte, from io.Reader, i int, generation uint64) (Sum, error) {
	s, err := d.key.ReadSum(dst, from, uint32(i), generation)
	if err != nil {
		return Sum{}, fmt.Errorf("read a page: %w", err)
	}
	return s, nil
}

type gmacDigester struct{ gcm cipher.AEAD }

func (d gmacDigester) sum(i int, generation uint64, page []byte) (s Sum) {
	var nonce [12]byte
	binary.LittleEndian.PutUint32(nonce[:4], uint32(i))
	binary.LittleEndian.PutUint64(nonce[4:], generation)
	d.gcm.Seal(s[:0], nonce[:], nil, page)
	return s
}

func (d gmacDigester) copySum(dst, src []byte, i int, generation uint64) Sum {
	copy(dst, src)
	return d.sum(i, generation, dst)
}

func (d gmacDigester) readSum(dst []byte, from io.Reader, i int, generation uint64) (Sum, error) {
	if _, err := io.ReadFull(from, dst); err != nil {
		return Sum{}, fmt.Errorf("read a page: %w", err)
	}
	return d.sum(i, generation, dst), nil
}
