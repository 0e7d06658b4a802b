package pgembed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is whom the server runs as.
type account struct {
	name     string
	uid, gid uint32
	drop     bool // this process is root and drops to it
}

// serverUsers are whom root drops to, in this order.
var serverUsers = []string{"postgres", "nobody"}

func findAccount() (account, error) {
	if uid := os.Geteuid(); uid != 0 {
		name := strconv.Itoa(uid)
		if u, err := user.LookupId(name); err == nil {
			name = u.Username
		}
		return account{name: name, uid: uint32(uid), gid: uint32(os.Getegid())}, nil
	}
	for _, name := range serverUsers {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errU := strconv.ParseUint(u.Uid, 10, 32)
		gid, errG := strconv.ParseUint(u.Gid, 10, 32)
		if errU == nil && errG == nil && uid != 0 {
			return account{name: name, uid: uint32(uid), gid: uint32(gid), drop: true}, nil
		}
	}
	return account{}, ErrNoUser
}

func (a account) credential() *syscall.Credential {
	if !a.drop {
		return nil
	}
	return &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: []uint32{a.gid}}
}

// ownDir makes a folder that only the account can enter, or checks that an
// existing one belongs to it.
func (a account) ownDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	switch {
	case err == nil:
		if a.drop {
			err = os.Chown(dir, int(a.uid), int(a.gid))
		}
		return wrapDisk("create folder of the database", err)
	case !errors.Is(err, fs.ErrExist):
		return wrapDisk("create folder of the database", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("look at folder of the database: %w", err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != a.uid {
		return &OwnerError{Dir: dir, User: a.name, UID: st.Uid}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("close folder of the database: %w", err)
	}
	return nil
}

// canReach checks that the account can enter every folder above dir. It reads
// permission bits, as the kernel would for a user without capabilities; access
// lists are not considered.
func (a account) canReach(dir string) error {
	if !a.drop {
		return nil // this process has just been there itself
	}
	for up := filepath.Dir(dir); ; up = filepath.Dir(up) {
		info, err := os.Stat(up)
		if err != nil {
			return fmt.Errorf("look at the way to the database: %w", err)
		}
		bit := fs.FileMode(0o001)
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			switch {
			case st.Uid == a.uid:
				bit = 0o100
			case st.Gid == a.gid:
				bit = 0o010
			}
		}
		if info.Mode().Perm()&bit == 0 {
			return &UnreachableError{Dir: dir, Closed: up, User: a.name}
		}
		if up == filepath.Dir(up) {
			return nil
		}
	}
}

// wrapDisk names a full disk.
func wrapDisk(op string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%s: %w: %w", op, ErrDiskFull, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}
