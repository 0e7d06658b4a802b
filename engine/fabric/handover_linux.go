package fabric

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead.dev/engine/kv"
)

const (
	// handSuffix makes the path of the socket over which the descriptor goes
	// out of that of the page socket, so that it lies in the same folder.
	handSuffix = ".map"
	// handTimeout bounds an exchange on that socket, which has one message each
	// way on one host.
	handTimeout = 5 * time.Second
	// maxHands bounds how many of them go on at once.
	maxHands = 8
)

// handover gives the descriptor of the memory to clients that show a token.
type handover struct {
	mem   memoryID
	size  int
	path  string
	file  *os.File
	l     *net.UnixListener
	now   func() time.Time
	uid   func(*net.UnixConn) (int, error)
	mu    sync.Mutex
	valid map[token]bool // under mu; at most one for each page connection
}

// share makes the handover for a listener, or nil if there is nothing to share
// over it.
func (s *Server) share(l net.Listener) (*handover, error) {
	if s.arena == nil || s.arena.Arena().Memory != kv.Memfd || l.Addr().Network() != "unix" {
		return nil, nil
	}
	file, err := s.arena.Share()
	if err != nil {
		return nil, err
	}
	path := l.Addr().String() + handSuffix
	hl, err := Listen("unix:"+path, nil)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	h := &handover{
		size: s.arena.Arena().Bytes, path: path, file: file, l: hl.(*net.UnixListener),
		now: s.now, uid: s.uid, valid: map[token]bool{},
	}
	rand.Read(h.mem[:])
	return h, nil
}

func (h *handover) close() {
	_ = h.l.Close()
	_ = h.file.Close()
}

// issue makes a token that is good once.
func (h *handover) issue() (t token) {
	rand.Read(t[:])
	h.mu.Lock()
	defer h.mu.Unlock()
	h.valid[t] = true
	return t
}

// forget takes a token back and tells whether it was good.
func (h *handover) forget(t token) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	ok := h.valid[t]
	delete(h.valid, t)
	return ok
}

// serve hands the descriptor out until ctx ends; then the error is nil.
func (h *handover) serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = h.l.Close() })
	defer stop()
	var conns sync.WaitGroup
	defer conns.Wait()
	slots := make(chan struct{}, maxHands)
	for {
		slots <- struct{}{} // each is free again after handTimeout
		c, err := h.l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept readers of the memory: %w", err)
		}
		conns.Go(func() {
			defer func() { <-slots }()
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			defer stop()
			defer func() { _ = c.Close() }()
			_ = h.give(c)
		})
	}
}

// give gives the descriptor to a process of this user that shows a good token.
// Whatever it gets wrong ends the connection without a word.
func (h *handover) give(c *net.UnixConn) error {
	if err := c.SetDeadline(h.now().Add(handTimeout)); err != nil {
		return err
	}
	if err := checkUser(c, h.uid); err != nil {
		return err
	}
	var t token
	if _, err := io.ReadFull(c, t[:]); err != nil {
		return err
	}
	if !h.forget(t) {
		return ErrRefused
	}
	_, _, err := c.WriteMsgUnix([]byte{0}, unix.UnixRights(int(h.file.Fd())), nil)
	return err
}

// take gets the descriptor from a server of this user.
func take(ctx context.Context, g grant, now func() time.Time, uid func(*net.UnixConn) (int, error)) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, handTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", g.path)
	if err != nil {
		return nil, fmt.Errorf("connect for the memory: %w", err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	c := conn.(*net.UnixConn)
	if err := c.SetDeadline(now().Add(handTimeout)); err != nil {
		return nil, err
	}
	if err := checkUser(c, uid); err != nil {
		return nil, err
	}
	if _, err := c.Write(g.token[:]); err != nil {
		return nil, fmt.Errorf("ask for the memory: %w", err)
	}
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, fmt.Errorf("get the memory: %w", err)
	}
	return descriptor(n, oob[:oobn], flags)
}

// descriptor returns the one file that a message carries.
func descriptor(n int, oob []byte, flags int) (*os.File, error) {
	var files []*os.File
	msgs, err := unix.ParseSocketControlMessage(oob)
	for _, m := range msgs {
		fds, ferr := unix.ParseUnixRights(&m)
		err = errors.Join(err, ferr)
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "pages"))
		}
	}
	if err != nil || n != 1 || len(files) != 1 || flags&unix.MSG_CTRUNC != 0 {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		return nil, errors.Join(fmt.Errorf("%w: %d descriptors for the memory", ErrProtocol, len(files)), err)
	}
	return files[0], nil
}

// errUser means that a process of another user is at the other end.
var errUser = errors.New("the peer belongs to another user")

func checkUser(c *net.UnixConn, uid func(*net.UnixConn) (int, error)) error {
	u, err := uid(c)
	if err != nil {
		return fmt.Errorf("find out who the peer is: %w", err)
	}
	if own := os.Geteuid(); u != own {
		return fmt.Errorf("%w: %d, not %d", errUser, u, own)
	}
	return nil
}

// peerUID asks the kernel which user the process at the other end had when it
// connected or listened.
func peerUID(c *net.UnixConn) (uid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, err
	}
	return int(cred.Uid), nil
}

// wantSeals is what has to be sealed before memory of another process is
// mapped: without it the other could cut it off under a copy, which is the end
// of this process, or write it through a mapping made later.
const wantSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE

// errMemory means that memory is not what it has to be.
var errMemory = errors.New("the memory cannot be mapped safely")

// mapMemory maps sealed memory of exactly so many bytes for reading.
func mapMemory(f *os.File, size uint64) ([]byte, error) {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: read its seals: %w", errMemory, err)
	}
	if seals&wantSeals != wantSeals {
		return nil, fmt.Errorf("%w: seals are %#x", errMemory, seals)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMemory, err)
	}
	if uint64(info.Size()) != size {
		return nil, fmt.Errorf("%w: it has %d bytes, not %d", errMemory, info.Size(), size)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of pages: %w", size, err)
	}
	if err := unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		return nil, errors.Join(fmt.Errorf("exclude mapped pages from core dumps: %w", err), unix.Munmap(mem))
	}
	return mem, nil
}
