package pgembed

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
)

// debianFolders is where Debian and its children put server binaries.
const debianFolders = "/usr/lib/postgresql/*/bin"

// oldest is the oldest major version that the schema works with.
const oldest = 15

// FindBin returns the folder of the server binaries: override if it is set (and
// nothing else then), the newest of Debian's versioned folders, PATH, or what
// [Fetch] put into fetched earlier ("" for none). The error is ErrNoBinaries.
func FindBin(override, fetched string) (string, error) {
	if override != "" {
		if complete(override) {
			return override, nil
		}
		return "", ErrNoBinaries
	}
	version := func(dir string) int {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir))) // not a number is version 0
		return n
	}
	debian, _ := filepath.Glob(debianFolders) // the pattern is well formed
	debian = slices.DeleteFunc(debian, func(dir string) bool { return version(dir) < oldest })
	slices.SortFunc(debian, func(a, b string) int { return version(b) - version(a) })
	dirs := debian
	if p, err := exec.LookPath("postgres"); err == nil {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	if fetched != "" {
		dirs = append(dirs, fetchedBin(fetched))
	}
	for _, d := range dirs {
		if complete(d) {
			return d, nil
		}
	}
	return "", ErrNoBinaries
}

func complete(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return false
		}
	}
	return true
}
