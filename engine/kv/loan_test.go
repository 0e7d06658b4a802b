package kv_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
)

// A loan is a hold on every page of it: the pages of a handle that is released
// meanwhile are quarantined until the loan ends, and clean up then.
func TestLoanHolds(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4, Memory: kv.Memfd})
	s := kvtest.Sealed(t, p, alice, 48, 1)
	refs := kvtest.Refs(s.Extents())
	loan, err := p.Lend(s, []kv.PageRef{refs[2], refs[0], refs[2]})
	assert.NoError(t, err)
	size := int64(p.Geometry().PageBytes())
	assert.Equal(t, loan.Offsets(), []int64{int64(refs[2].Index) * size, int64(refs[0].Index) * size, int64(refs[2].Index) * size})
	assert.Equal(t, p.Page(refs[2].Index).Readers, 2)
	s.Release()
	for i, want := range []kv.State{kv.StateQuarantined, kv.StateDirty, kv.StateQuarantined} {
		assert.Equal(t, p.Page(refs[i].Index).State, want)
	}
	assert.Equal(t, p.Page(refs[0].Index).Reason, kv.ReaderOpen)
	_, err = p.Reserve(bob, 3)
	assert.Equal(t, assert.ErrorAs[kv.ErrExhausted](t, err).Free, 2)
	assert.ErrorIs(t, p.Close(), kv.ErrBusy)
	loan.Close()
	loan.Close()
	assert.Equal(t, p.Stats().Free, 4)
	assert.NoError(t, p.Audit())
}

// All or none is lent.
func TestLendRefuses(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4, Memory: kv.Memfd})
	s := kvtest.Sealed(t, p, alice, 32, 1)
	refs := kvtest.Refs(s.Extents())
	stale := kv.PageRef{Index: refs[1].Index, Generation: refs[1].Generation + 1}
	_, err := p.Lend(s, []kv.PageRef{refs[0], stale})
	assert.ErrorIs(t, err, kv.ErrStale)
	_, err = p.Lend(s, []kv.PageRef{refs[0], {Index: 3, Generation: refs[0].Generation}})
	assert.ErrorIs(t, err, kv.ErrRange)
	other := kvtest.Pool(t, kv.Config{Pages: 4, Memory: kv.Memfd})
	_, err = other.Lend(s, refs[:1])
	assert.ErrorIs(t, err, kv.ErrRange)
	assert.Equal(t, p.Page(refs[0].Index).Readers, 0)
	s.Release()
	_, err = p.Lend(s, refs[:1])
	assert.ErrorIs(t, err, kv.ErrStale)
}

// What is shared shows the pages as they are, and cannot be written in any way.
func TestShare(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4, Memory: kv.Memfd})
	s := kvtest.Sealed(t, p, alice, 32, 1)
	defer s.Release()
	f, err := p.Share()
	assert.NoError(t, err)
	defer f.Close()
	fd := int(f.Fd())
	size := p.Arena().Bytes
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	assert.NoError(t, err)
	assert.Equal(t, flags&unix.FD_CLOEXEC, unix.FD_CLOEXEC)
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
	assert.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()
	ref := kvtest.Refs(s.Extents())[1]
	loan, err := p.Lend(s, []kv.PageRef{ref})
	assert.NoError(t, err)
	defer loan.Close()
	at := loan.Offsets()[0]
	assert.NoError(t, s.View(ref, func(page []byte) error {
		assert.Equal(t, mem[at:at+int64(len(page))], page)
		return nil
	}))

	_, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	assert.ErrorIs(t, err, unix.EACCES)
	assert.ErrorIs(t, unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES)
	_, err = unix.Pwrite(fd, []byte{1}, 0)
	assert.ErrorIs(t, err, unix.EBADF)
	assert.True(t, unix.Ftruncate(fd, 0) != nil)
	assert.True(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096) != nil)

	private := kvtest.Pool(t, kv.Config{Pages: 1})
	_, err = private.Share()
	assert.ErrorIs(t, err, kv.ErrConfig)
}
