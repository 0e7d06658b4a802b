package mem

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"unsafe"

	"golang.org/x/sys/unix"

	"bulkhead.dev/infra/assert"
)

var secret = [32]byte{1, 2, 3}

// sizes are around every edge: a line, a stripe (which is also the size from
// which on stores go past the caches), what ReadSum reads at once, a real page.
var sizes = []int{
	0, 64, 128, 192, 1024, farBytes - 64, farBytes, farBytes + 64, 8128, 8192, 8256, 20032,
	readBytes - 64, readBytes, readBytes + 64, 368640,
}

const farBytes = 4 << 10 // FAR in kernels.c

func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

// aligned returns n bytes of memory from at bytes after a line, as part of the
// whole, which has guard bytes on both sides.
func aligned(n, at int) (whole, part []byte) {
	const guard = 128
	whole = bytes.Repeat([]byte{0xA5}, n+2*guard+2*Line)
	from := guard
	for (uintptr(unsafe.Pointer(&whole[from]))-uintptr(at))%Line != 0 {
		from++
	}
	return whole, whole[from : from+n]
}

// plain is the digest as doc.go puts it, with nothing done to make it fast.
func plain(k *Key, page []byte) []byte {
	var in []byte
	for at := 0; at < len(page); at += stripeBytes {
		m := page[at:min(at+stripeBytes, len(page))]
		word := func(j int) uint32 { return binary.LittleEndian.Uint32(m[4*j:]) }
		for p := range lanes {
			var sum uint64
			for j := 0; j < len(m)/4; j += 2 {
				sum += uint64(word(j)+k.nh[4*p+j]) * uint64(word(j+1)+k.nh[4*p+j+1])
			}
			in = binary.LittleEndian.AppendUint64(in, sum)
		}
	}
	in = binary.LittleEndian.AppendUint64(in, uint64(len(page)))
	return append(in, 0, 0, 0, 0, 0, 0, 0, 0)
}

func each(t *testing.T, f func(t *testing.T, run *level, k *Key)) {
	for i := range levels {
		t.Run(levels[i].name, func(t *testing.T) { f(t, &levels[i], newKey(secret, &levels[i])) })
	}
}

// Every level computes what the definition says, for every length and however
// the memory lies, stores the page, and touches nothing beside it.
func TestLevelsAgree(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, _ *level, k *Key) {
		for _, n := range sizes {
			for _, at := range []int{0, 1, 32} {
				_, src := aligned(n, 64-at)
				copy(src, random(uint64(n), n))
				nonce := binary.LittleEndian.AppendUint64([]byte{7, 0, 0, 0}, 9)
				want := [SumBytes]byte(k.mac.Seal(nil, nonce, nil, plain(k, src)))
				assert.Equal(t, k.Sum(7, 9, src), want)

				whole, dst := aligned(n, at)
				assert.Equal(t, k.CopySum(dst, src, 7, 9), want)
				checkOnly(t, whole, dst, src)

				whole, dst = aligned(n, at)
				got, err := k.ReadSum(dst, iotest.HalfReader(bytes.NewReader(src)), 7, 9)
				assert.NoError(t, err)
				assert.Equal(t, got, want)
				checkOnly(t, whole, dst, src)
			}
		}
	})
}

// checkOnly checks that dst holds want and the rest of whole what aligned put
// there.
func checkOnly(t *testing.T, whole, dst, want []byte) {
	t.Helper()
	if !bytes.Equal(dst, want) {
		t.Fatalf("%d bytes are not what was to be stored", len(dst))
	}
	n := len(dst)
	copy(dst, bytes.Repeat([]byte{0xA5}, n))
	for i, b := range whole {
		if b != 0xA5 {
			t.Fatalf("byte %d beside %d bytes was touched", i, n)
		}
	}
}

// The sums are part of what two workers agree on and never change. These were
// computed in Python and OpenSSL, from doc.go alone.
func TestGolden(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, _ *level, k *Key) {
		for n, want := range map[int]string{
			0:      "d8bd528ecabc68d2ab7844d7eb503fb7",
			64:     "ef02da5230748e43b541712f8c5e2ccc",
			368640: "2c3d46d13c0d259583e675ef134be707",
		} {
			page := make([]byte, n)
			for i := range page {
				page[i] = byte(i * 31 >> 3)
			}
			sum := k.Sum(3, 1<<40, page)
			assert.Equal(t, hex.EncodeToString(sum[:]), want)
		}
	})
}

// Expanding the secret: first the key of GMAC, then that of NH, each from its
// part of one key stream.
func TestKeysDiffer(t *testing.T) {
	t.Parallel()
	page := random(1, 4096)
	seen := map[[SumBytes]byte]string{}
	add := func(what string, sum [SumBytes]byte) {
		t.Helper()
		if other, ok := seen[sum]; ok {
			t.Errorf("%s and %s have one sum", what, other)
		}
		seen[sum] = what
	}
	for i := range secret {
		s := secret
		s[i] ^= 0x40
		add(fmt.Sprintf("secret %d", i), NewKey(s).Sum(0, 0, page))
	}
	k := NewKey(secret)
	words := map[uint32]bool{}
	for _, w := range k.nh {
		words[w] = true
	}
	assert.True(t, len(words) > len(k.nh)-4) // random words hardly repeat
	for bit := range 32 {
		add(fmt.Sprintf("index %d", bit), k.Sum(1<<bit, 0, page))
	}
	for bit := range 64 {
		add(fmt.Sprintf("generation %d", bit), k.Sum(0, 1<<bit, page))
	}
	for n := 0; n <= len(page); n += Line {
		add(fmt.Sprintf("first %d bytes", n), k.Sum(0, 0, page[:n]))
	}
	// Length counts even where the bytes make no difference to the lanes.
	add("two zero pages", k.Sum(9, 0, make([]byte, 64)))
	add("of different length", k.Sum(9, 0, make([]byte, 128)))
	for _, v := range []string{"%v", "%+v", "%#v", "%s"} {
		assert.Equal(t, fmt.Sprintf(v, k), "REDACTED")
	}
}

// Each lane sees each bit. The sums of step 2 would hide a lane that does not.
func TestEveryBitCounts(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, run *level, k *Key) {
		page := random(2, 2*stripeBytes+192)
		lanesOf := func() []uint64 {
			sums := make([]uint64, stripes(len(page))*lanes)
			run.nh(&k.nh, nil, page, 0, sums)
			return sums
		}
		before := lanesOf()
		rng := rand.New(rand.NewPCG(1, 2))
		flip := func(bit int) {
			page[bit/8] ^= 1 << (bit % 8)
			after := lanesOf()
			page[bit/8] ^= 1 << (bit % 8)
			for i := range before {
				if same, here := before[i] == after[i], i/lanes == bit/8/stripeBytes; same == here {
					t.Fatalf("bit %d, lane %d: same %v", bit, i, same)
				}
			}
		}
		for bit := range 64 * 8 {
			flip(bit)
			flip(stripeBytes*8 + bit)
			flip(len(page)*8 - 1 - bit)
		}
		for range 3000 {
			flip(rng.IntN(len(page) * 8))
		}
		// Words that change places, in a pair, between pairs and between lines.
		sum := k.Sum(0, 0, page)
		for _, d := range []int{4, 8, 16, 64, 4096} {
			other := bytes.Clone(page)
			copy(other[128:132], page[128+d:])
			copy(other[128+d:132+d], page[128:])
			assert.True(t, k.Sum(0, 0, other) != sum)
		}
	})
}

// However a page is cut, it has one sum.
func TestPieces(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, _ *level, k *Key) {
		src := random(3, 368640)
		want := k.Sum(1, 2, src)
		rng := rand.New(rand.NewPCG(3, 4))
		for range 20 {
			h, dst := k.NewHasher(), make([]byte, len(src))
			for at := 0; at < len(src); {
				n := min(rng.IntN(40)*Line<<rng.IntN(7), len(src)-at)
				if rng.IntN(2) == 0 {
					h.Copy(dst[at:at+n], src[at:at+n])
				} else {
					copy(dst[at:], src[at:at+n])
					h.Add(dst[at : at+n])
				}
				at += n
			}
			assert.Equal(t, h.Sum(1, 2), want)
			assert.Equal(t, h.Sum(1, 2), want)
			assert.True(t, bytes.Equal(dst, src))
		}
	})
}

func FuzzLevels(f *testing.F) {
	f.Add([]byte("page"), uint16(3), uint16(70))
	f.Fuzz(func(t *testing.T, fill []byte, cut, lines uint16) {
		if len(fill) == 0 {
			return
		}
		page := bytes.Repeat(fill, int(lines)*Line/len(fill)+1)[:int(lines)*Line]
		at := min(int(cut)*Line, len(page))
		want := newKey(secret, &goLevel).Sum(0, 1, page)
		for i := range levels {
			k := newKey(secret, &levels[i])
			h, dst := k.NewHasher(), make([]byte, len(page))
			h.Copy(dst[:at], page[:at])
			h.Copy(dst[at:], page[at:])
			if h.Sum(0, 1) != want || k.Sum(0, 1, dst) != want {
				t.Fatalf("%s: %d bytes, cut at %d", levels[i].name, len(page), at)
			}
		}
	})
}

// What is digested is what is stored, while somebody else changes the source.
func TestSourceChangesMeanwhile(t *testing.T) {
	t.Parallel()
	const n = 128 << 10
	// Two mappings, as of two processes.
	fd, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
	assert.NoError(t, err)
	defer unix.Close(fd)
	assert.NoError(t, unix.Ftruncate(fd, n))
	var maps [2][]byte
	for i := range maps {
		maps[i], err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		assert.NoError(t, err)
		defer func() { assert.NoError(t, unix.Munmap(maps[i])) }()
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	words := unsafe.Slice((*uint64)(unsafe.Pointer(&maps[1][0])), n/8)
	wg.Go(func() {
		for x := uint64(1); !stop.Load(); x++ {
			for i := range words {
				atomic.StoreUint64(&words[i], x*0x9E3779B97F4A7C15)
			}
		}
	})
	defer wg.Wait()
	defer stop.Store(true)
	each(t, func(t *testing.T, _ *level, k *Key) {
		for _, size := range []int{farBytes - 64, n} { // with either kind of store
			_, dst := aligned(size, 0)
			torn := 0
			for range 300 {
				assert.Equal(t, k.CopySum(dst, maps[0][:size], 0, 0), k.Sum(0, 0, dst))
				if !bytes.Equal(dst[:8], dst[size-8:]) {
					torn++
				}
			}
			t.Logf("%d of 300 pages of %d bytes were torn", torn, size)
		}
	})
}

func TestCopyAndWipe(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, run *level, _ *Key) {
		for _, n := range append(sizes, 1, 63, 65, farBytes+1, farBytes+63, 1<<17+7) {
			for _, at := range []int{0, 1, 32} {
				src := random(uint64(n), n)
				whole, dst := aligned(n, at)
				run.copy(dst, src)
				checkOnly(t, whole, dst, src)
				for _, pattern := range []byte{0, 0xFF, 0x5A} {
					whole, dst = aligned(n, at)
					run.fill(dst, pattern)
					checkOnly(t, whole, dst, bytes.Repeat([]byte{pattern}, n))
				}
			}
		}
	})
	_, dst := aligned(farBytes, 0)
	Copy(dst, random(5, farBytes))
	assert.True(t, bytes.Equal(dst, random(5, farBytes)))
	Wipe(dst, 3)
	assert.True(t, bytes.Equal(dst, bytes.Repeat([]byte{3}, farBytes)))
}

// source gives random numbers of lines out of memory.
type source struct {
	bytes.Reader
	rng *rand.Rand
}

func (s *source) Next(n int) ([]byte, error) {
	b := make([]byte, min(n, (1+s.rng.IntN(100))*Line))
	_, err := io.ReadFull(s, b)
	return b, err
}

func TestReadSumOfASource(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, _ *level, k *Key) {
		page := random(6, 368640)
		s := &source{rng: rand.New(rand.NewPCG(5, 6))}
		s.Reset(append(page, 1, 2, 3))
		whole, dst := aligned(len(page), 0)
		got, err := k.ReadSum(dst, s, 1, 2)
		assert.NoError(t, err)
		assert.Equal(t, got, k.Sum(1, 2, page))
		checkOnly(t, whole, dst, page)
		assert.Equal(t, s.Len(), 3)
		s.Reset(page[:len(page)-Line])
		_, err = k.ReadSum(dst, s, 1, 2)
		assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
	})
}

func TestReadSumFails(t *testing.T) {
	t.Parallel()
	k := NewKey(secret)
	dst := make([]byte, readBytes+Line)
	for n, want := range map[int]error{0: io.ErrUnexpectedEOF, 5: io.ErrUnexpectedEOF, readBytes: io.ErrUnexpectedEOF, len(dst) - 1: io.ErrUnexpectedEOF} {
		_, err := k.ReadSum(dst, bytes.NewReader(make([]byte, n)), 0, 0)
		assert.ErrorIs(t, err, want)
	}
	broken := errors.New("broken")
	_, err := k.ReadSum(dst, iotest.ErrReader(broken), 0, 0)
	assert.ErrorIs(t, err, broken)
	// It takes one page and no more.
	rest := bytes.NewReader(make([]byte, len(dst)+7))
	_, err = k.ReadSum(dst, rest, 0, 0)
	assert.NoError(t, err)
	assert.Equal(t, rest.Len(), 7)
}

func TestMisuse(t *testing.T) {
	t.Parallel()
	k := NewKey(secret)
	for name, f := range map[string]func(){
		"half a line":     func() { k.Sum(0, 0, make([]byte, 32)) },
		"a byte too much": func() { k.NewHasher().Add(make([]byte, 65)) },
		"short copy":      func() { Copy(make([]byte, 64), make([]byte, 128)) },
		"long copy":       func() { k.CopySum(make([]byte, 128), make([]byte, 64), 0, 0) },
		"no memory":       func() { k.CopySum(nil, make([]byte, 64), 0, 0) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
	assert.Equal(t, Level(), levels[len(levels)-1].name)
}
