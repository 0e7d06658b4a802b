package fabric

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/mem"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// benchEnv makes the test binary the prefill side of BenchmarkHandoff, with its
// sockets in this folder.
const benchEnv = "BULKHEAD_BENCH_FABRIC_DIR"

// benchPages are 64 MiB of pages of a model of 30 layers, 368,640 bytes each.
const benchPages = 182

func benchGeometry() kv.Geometry {
	return kv.Geometry{Layers: 30, KVHeads: 3, HeadDim: 64, PageTokens: kv.PageTokens, DType: kv.F16, Layout: kv.Layout1}
}

// stream is one kind of socket: the address of a page server, and that of a bare
// server, which sends the same pages with nothing around them.
type stream struct {
	Name, Pages, Bare string
	TLS               bool
}

// benchOffer is what the prefill side tells the other.
type benchOffer struct {
	Claim     kv.Claim
	Streams   []stream
	Cert, Key []byte // of both sides
	pid       int
}

func (o benchOffer) tls() *tls.Config {
	key, err := x509.ParseECPrivateKey(o.Key)
	if err != nil {
		panic(err)
	}
	cert, err := x509.ParseCertificate(o.Cert)
	if err != nil {
		panic(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{o.Cert}, PrivateKey: key}},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: pool, RootCAs: pool, ServerName: "prefill",
	}
}

// benchPrefill fills pages, offers them on every kind of socket, and serves until
// stdin ends.
func benchPrefill(dir string) error {
	pool, err := kv.New(kv.Config{Geometry: benchGeometry(), Pages: benchPages, Memory: kv.Memfd})
	if err != nil {
		return err
	}
	sealed, err := benchFill(pool)
	if err != nil {
		return err
	}
	key := kv.DigestKey{Alg: kv.NH, Secret: [32]byte{3}}
	sums, err := sealed.Sums(key, 0)
	if err != nil {
		return err
	}
	o := benchOffer{Claim: kv.Claim{Tokens: benchPages * kv.PageTokens, Key: key}}
	for _, e := range sealed.Extents() {
		for j := range e.Count {
			o.Claim.Pages = append(o.Claim.Pages, kv.PageClaim{
				From: PageRef{Index: e.First + j, Generation: e.Generation}, Sum: sums[len(o.Claim.Pages)],
			})
		}
	}
	if o.Cert, o.Key, err = benchCert(); err != nil {
		return err
	}
	server := NewServer(ServerOptions{Arena: pool})
	if err := server.Open(theTransfer, theSecret, sealed); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var group errgroup.Group
	for _, s := range []stream{{Name: "unix"}, {Name: "tcp"}, {Name: "unix", TLS: true}, {Name: "tcp", TLS: true}} {
		var conf *tls.Config
		if s.TLS {
			conf = o.tls()
		}
		listen := func(name string) (net.Listener, error) {
			if s.Name == "tcp" {
				return Listen("tcp:127.0.0.1:0", conf)
			}
			return Listen("unix:"+filepath.Join(dir, name+strconv.FormatBool(s.TLS)), conf)
		}
		pages, err := listen("p")
		if err != nil {
			return err
		}
		bare, err := listen("b")
		if err != nil {
			return err
		}
		group.Go(func() error { return server.Serve(ctx, pages) })
		group.Go(func() error { return serveBare(ctx, bare, sealed, o.Claim) })
		s.Pages, s.Bare = Address(pages), Address(bare)
		o.Streams = append(o.Streams, s)
	}
	if err := json.NewEncoder(os.Stdout).Encode(o); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	return group.Wait()
}

func benchFill(pool *kv.Pool) (*kv.Sealed, error) {
	credits, err := pool.Reserve(id.Owner{1}, benchPages)
	if err != nil {
		return nil, err
	}
	f, err := credits.Fill(id.Lease{1})
	if err != nil {
		return nil, err
	}
	if err := f.Grant(benchPages); err != nil {
		return nil, err
	}
	table, err := f.Table(0, benchPages*kv.PageTokens)
	if err != nil {
		return nil, err
	}
	addrs, err := table.Resolve(nil, benchPages*kv.PageTokens)
	if err != nil {
		return nil, err
	}
	rng := mrand.New(mrand.NewPCG(1, 2))
	for _, a := range addrs {
		words := unsafe.Slice(*(**uint64)(unsafe.Pointer(&a)), pool.Geometry().PageBytes()/8)
		for i := range words {
			words[i] = rng.Uint64() | 0x0001000100010001
		}
	}
	if err := table.Advance(benchPages * kv.PageTokens); err != nil {
		return nil, err
	}
	table.Close()
	return f.Seal(benchPages * kv.PageTokens)
}

func benchCert() (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"prefill"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	if cert, err = x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k); err != nil {
		return nil, nil, err
	}
	key, err = x509.MarshalECPrivateKey(k)
	return cert, key, err
}

// serveBare sends all pages for each byte that comes, with one write for each.
func serveBare(ctx context.Context, l net.Listener, sealed *kv.Sealed, claim kv.Claim) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	c, err := l.Accept()
	if err != nil {
		return nil // nobody came
	}
	defer func() { _ = c.Close() }()
	smallBuffer(c)
	for one := make([]byte, 1); ; {
		if _, err := io.ReadFull(c, one); err != nil {
			return nil // the other side has finished
		}
		for _, p := range claim.Pages {
			if err := sealed.View(p.From, func(page []byte) error { _, err := c.Write(page); return err }); err != nil {
				return err
			}
		}
	}
}

// BenchmarkHandoff reads 64 MiB of pages of another process into an arena, with
// the digest of each page made in the same pass and verified afterwards, and
// compares that with the least that such a read could do: out of shared memory
// with a copy() of the same pages one by one, over a stream with a loop of
// io.ReadFull over the same kind of socket. Every way runs once in each round,
// so that whatever else runs here disturbs all alike. The ratio is the median of
// those of the rounds, and that of the best times. BENCH_ROUNDS sets the number of
// rounds.
func BenchmarkHandoff(b *testing.B) {
	rounds := 15
	if n, err := strconv.Atoi(os.Getenv("BENCH_ROUNDS")); err == nil && n > 0 {
		rounds = n
	}
	o := startPrefill(b)
	size := benchGeometry().PageBytes()
	total := benchPages * size
	arena, err := unix.Mmap(-1, 0, total, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	assert.NoError(b, err)
	defer func() { assert.NoError(b, unix.Munmap(arena)) }()
	clear(arena) // so that the kernel has given it
	pool, err := kv.New(kv.Config{Geometry: benchGeometry(), Pages: benchPages})
	assert.NoError(b, err)
	defer func() { assert.NoError(b, pool.Close()) }()

	type way struct {
		name string
		base int // which way it is compared with
		run  func() time.Duration
		took []time.Duration
		// Processor time on either side, which says more where the processors
		// are not ours alone.
		here, there []time.Duration
	}
	var ways []*way
	add := func(name string, base int, run func() time.Duration) int {
		ways = append(ways, &way{name: name, base: base, run: run})
		return len(ways) - 1
	}
	read := func(c *Client) func() time.Duration {
		b.Cleanup(func() { _ = c.Close() })
		return func() time.Duration { return receive(b, pool, c, o.Claim) }
	}

	shm, err := Dial(o.Streams[0].Pages, nil)
	assert.NoError(b, err)
	readShm := read(shm)
	readShm() // maps the memory
	assert.Equal(b, shm.Transport(), SharedMemory)
	each := func(f func(dst, src []byte)) func() time.Duration {
		return func() time.Duration {
			began := time.Now()
			for i, p := range o.Claim.Pages {
				at := int(p.From.Index) * size
				f(arena[i*size:(i+1)*size], shm.mapped.bytes[at:at+size])
			}
			return time.Since(began)
		}
	}
	base := add("copy() of mapped pages", -1, each(func(dst, src []byte) { copy(dst, src) }))
	add("mem.Copy of mapped pages", base, each(mem.Copy))
	add("pages out of shared memory", base, readShm)
	for _, s := range o.Streams {
		name, conf := s.Name, (*tls.Config)(nil)
		if s.TLS {
			name, conf = name+" with TLS", o.tls()
		}
		bare := dialBare(b, s, conf)
		base := add("io.ReadFull, "+name, -1, func() time.Duration {
			began := time.Now()
			_, err := bare.Write([]byte{1})
			assert.NoError(b, err)
			for at := 0; at < total; at += size {
				_, err := io.ReadFull(bare, arena[at:at+size])
				assert.NoError(b, err)
			}
			return time.Since(began)
		})
		c, err := NewClient(s.Pages, ClientOptions{TLS: conf, StreamOnly: true})
		assert.NoError(b, err)
		add("pages, "+name, base, read(c))
	}

	for b.Loop() {
		for range rounds + 1 {
			for _, w := range ways {
				here, there := cpuTime(b, os.Getpid()), cpuTime(b, o.pid)
				w.took = append(w.took, w.run())
				w.here, w.there = append(w.here, cpuTime(b, os.Getpid())-here), append(w.there, cpuTime(b, o.pid)-there)
			}
		}
	}
	for _, w := range ways {
		w.took = w.took[1:] // the first warms up
	}
	fmt.Printf("\n%d pages of %d bytes, %d rounds, digest level %s\n", benchPages, size, rounds, mem.Level())
	fmt.Printf("%-28s %9s %6s %9s %9s %9s %22s\n", "", "median", "GB/s", "best", "CPU here", "there", "of base: median, best")
	for _, w := range ways {
		m := median(w.took)
		fmt.Printf("%-28s %9s %6.2f %9s", w.name, m.Round(10*time.Microsecond), float64(total)/m.Seconds()/1e9, slices.Min(w.took).Round(10*time.Microsecond))
		for _, cpu := range [][]time.Duration{w.here, w.there} {
			fmt.Printf(" %9s", median(cpu).Round(10*time.Microsecond))
		}
		if w.base >= 0 {
			base := ways[w.base].took
			ratios := make([]float64, len(base))
			for i := range base {
				ratios[i] = 100 * base[i].Seconds() / w.took[i].Seconds()
			}
			fmt.Printf(" %12.1f %%  %5.1f %%", median(ratios), 100*slices.Min(base).Seconds()/slices.Min(w.took).Seconds())
		}
		fmt.Println()
	}
}

// median returns the value in the middle.
func median[T cmp.Ordered](of []T) T {
	of = slices.Clone(of)
	slices.Sort(of)
	return of[len(of)/2]
}

// cpuTime returns the processor time that a process has used.
func cpuTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	var t unix.Timespec
	const ofProcess = 2 // CPUCLOCK_SCHED, see clock_getcpuclockid(3)
	assert.NoError(b, unix.ClockGettime(int32(^pid<<3|ofProcess), &t))
	return time.Duration(t.Nano())
}

// startPrefill starts the other process.
func startPrefill(b *testing.B) (o benchOffer) {
	b.Helper()
	self, err := os.Executable()
	assert.NoError(b, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), benchEnv+"="+b.TempDir())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	assert.NoError(b, err)
	out, err := cmd.StdoutPipe()
	assert.NoError(b, err)
	assert.NoError(b, cmd.Start())
	b.Cleanup(func() {
		_ = in.Close()
		assert.NoError(b, cmd.Wait())
	})
	assert.NoError(b, json.NewDecoder(out).Decode(&o))
	o.pid = cmd.Process.Pid
	return o
}

func dialBare(b *testing.B, s stream, conf *tls.Config) net.Conn {
	b.Helper()
	network, where, err := split(s.Bare)
	assert.NoError(b, err)
	c, err := net.Dial(network, where)
	assert.NoError(b, err)
	if conf != nil {
		c = tls.Client(c, conf)
	}
	b.Cleanup(func() { _ = c.Close() })
	return c
}

// receive lands all pages and returns how long they took to arrive, digests
// included. That they are the right ones is verified outside of that time.
func receive(b *testing.B, pool *kv.Pool, c *Client, claim kv.Claim) time.Duration {
	b.Helper()
	credits, err := pool.Reserve(id.Owner{1}, benchPages)
	assert.NoError(b, err)
	landing, err := credits.Land(id.Lease{2})
	assert.NoError(b, err)
	assert.NoError(b, landing.Grant(benchPages))
	refs := make([]PageRef, len(claim.Pages))
	for i, p := range claim.Pages {
		refs[i] = p.From
	}
	began := time.Now()
	assert.NoError(b, landing.Receive(claim.Key, refs, func(in *kv.Intake) error {
		return c.ReadPages(b.Context(), theTransfer, theSecret, refs, in)
	}))
	took := time.Since(began)
	sequence, err := landing.Commit(claim)
	assert.NoError(b, err)
	sequence.Release()
	return took
}
