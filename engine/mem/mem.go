package mem

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

const (
	// stripeBytes is what one set of lanes covers: the key of it stays in the
	// first-level cache, and the lanes are less than a hundredth of the page.
	stripeBytes = 4096
	// lanes of 32 bits of certainty each.
	lanes = 4
	// keyTail is how many more key words than message words a stripe has: four
	// for every lane but the first, and four that only complete a line.
	keyTail = 4 * lanes

	// Line is what every length is a multiple of.
	Line = 64
	// SumBytes is the size of a sum.
	SumBytes = 16
	// readBytes is how much ReadSum reads before it digests that: few calls, and
	// the bytes are still in the second-level cache.
	readBytes = 128 << 10
)

type nhKey [stripeBytes/4 + keyTail]uint32

// levels has what runs on this CPU, slowest first.
var levels = append([]level{goLevel}, cLevels()...)

func best() *level { return &levels[len(levels)-1] }

// Level returns the name of the implementation that runs here: "go", "avx2" or
// "avx512". All compute the same sums.
func Level() string { return best().name }

// Copy copies src to dst, which must be as long.
func Copy(dst, src []byte) {
	sameLength(dst, src)
	best().copy(dst, src)
}

// Wipe overwrites every byte of dst with the pattern.
func Wipe(dst []byte, pattern byte) { best().fill(dst, pattern) }

// Key digests the pages of one transfer. It may be used from any goroutine.
type Key struct {
	nh  nhKey
	mac cipher.AEAD
	run *level
}

// NewKey expands a secret. Never use one for two transfers.
func NewKey(secret [32]byte) *Key { return newKey(secret, best()) }

func newKey(secret [32]byte, run *level) *Key {
	k := &Key{run: run}
	var stream [32 + len(k.nh)*4]byte
	cipher.NewCTR(mustAES(secret[:]), make([]byte, aes.BlockSize)).XORKeyStream(stream[:], stream[:])
	mac, err := cipher.NewGCM(mustAES(stream[:32]))
	if err != nil {
		panic("mem: " + err.Error()) // AES has the block size of GCM
	}
	k.mac = mac
	for i := range k.nh {
		k.nh[i] = binary.LittleEndian.Uint32(stream[32+4*i:])
	}
	return k
}

func mustAES(key []byte) cipher.Block {
	b, err := aes.NewCipher(key)
	if err != nil {
		panic("mem: " + err.Error()) // the length is right
	}
	return b
}

// String hides the key.
func (*Key) String() string { return "REDACTED" }

// GoString hides the key.
func (*Key) GoString() string { return "REDACTED" }

// Sum digests a page in its place.
func (k *Key) Sum(index uint32, generation uint64, page []byte) [SumBytes]byte {
	h := k.hasher(len(page))
	h.Add(page)
	return h.Sum(index, generation)
}

// CopySum copies src to dst, which must be as long, and digests what it stores,
// in one pass.
func (k *Key) CopySum(dst, src []byte, index uint32, generation uint64) [SumBytes]byte {
	h := k.hasher(len(src))
	h.Copy(dst, src)
	return h.Sum(index, generation)
}

// Source is a stream whose next bytes lie in memory already.
type Source interface {
	io.Reader
	// Next returns the next bytes, which count as read then: n at most, whole
	// lines only, and one at least. They are good until the next call of a
	// method. n is a multiple of Line.
	Next(n int) ([]byte, error)
}

// ReadSum fills dst from a stream and digests it on the way, in one pass if the
// stream is a Source. The error is that of the stream; io.ErrUnexpectedEOF if it
// ended early.
func (k *Key) ReadSum(dst []byte, from io.Reader, index uint32, generation uint64) ([SumBytes]byte, error) {
	h := k.hasher(len(dst))
	source, direct := from.(Source)
	for len(dst) > 0 {
		n := min(len(dst), readBytes)
		var err error
		if direct {
			var b []byte
			if b, err = source.Next(len(dst)); err == nil {
				n = len(b)
				h.Copy(dst[:n], b)
			}
		} else if _, err = io.ReadFull(from, dst[:n]); err == nil {
			h.Add(dst[:n])
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return [SumBytes]byte{}, fmt.Errorf("read a page: %w", err)
		}
		dst = dst[n:]
	}
	return h.Sum(index, generation), nil
}

// Hasher digests a page that comes in pieces. It must not be copied.
type Hasher struct {
	key  *Key
	n    int      // bytes so far
	sums []uint64 // the lanes of each stripe that has begun
}

// NewHasher begins a page.
func (k *Key) NewHasher() *Hasher { return k.hasher(0) }

// hasher has room for a page of so many bytes.
func (k *Key) hasher(page int) *Hasher {
	return &Hasher{key: k, sums: make([]uint64, 0, stripes(page)*lanes)}
}

func stripes(n int) int { return (n + stripeBytes - 1) / stripeBytes }

// Add digests the next piece, a multiple of Line.
func (h *Hasher) Add(piece []byte) { h.add(nil, piece) }

// Copy copies the next piece, a multiple of Line, and digests what it stores.
func (h *Hasher) Copy(dst, src []byte) {
	sameLength(dst, src)
	h.add(dst, src)
}

func (h *Hasher) add(dst, src []byte) {
	if len(src)%Line != 0 {
		panic(fmt.Sprintf("mem: a piece of %d bytes, which is no multiple of %d", len(src), Line))
	}
	if len(src) == 0 {
		return
	}
	first := h.n / stripeBytes * lanes
	at := h.n % stripeBytes
	h.n += len(src)
	for len(h.sums) < stripes(h.n)*lanes {
		h.sums = append(h.sums, 0)
	}
	h.key.run.nh(&h.key.nh, dst, src, at, h.sums[first:])
}

// Sum returns the digest of all pieces as one page in its place. More may be
// added afterwards.
func (h *Hasher) Sum(index uint32, generation uint64) (sum [SumBytes]byte) {
	in := make([]byte, 0, len(h.sums)*8+16)
	for _, s := range h.sums {
		in = binary.LittleEndian.AppendUint64(in, s)
	}
	in = binary.LittleEndian.AppendUint64(in, uint64(h.n))
	in = binary.LittleEndian.AppendUint64(in, 0)
	var nonce [12]byte
	binary.LittleEndian.PutUint32(nonce[:4], index)
	binary.LittleEndian.PutUint64(nonce[4:], generation)
	h.key.mac.Seal(sum[:0], nonce[:], nil, in)
	return sum
}

func sameLength(dst, src []byte) {
	if len(dst) != len(src) {
		panic(fmt.Sprintf("mem: %d bytes into %d", len(src), len(dst)))
	}
}
