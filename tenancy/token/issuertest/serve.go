package issuertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"
)

// Env names the variable with the address on which [Main] serves, such as "127.0.0.1:0".
const Env = "BULKHEAD_TEST_ISSUER"

// Start serves an issuer on a loopback address until the test ends. path is the path of
// its URL: "" or "/" or "/realms/one".
func Start(t testing.TB, path string, now func() time.Time) *Issuer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	i, err := New("http://"+l.Addr().String()+path, now)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- i.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return i
}

// Serve serves the issuer on a listener until the context ends, and then closes all
// connections.
func (i *Issuer) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{Handler: i, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve issuer: %w", err)
	}
	return nil
}

// Main turns the process into an issuer if the environment has [Env]: it prints the URL and
// serves until SIGINT or SIGTERM. Otherwise it returns at once. A TestMain that calls it makes
// the test binary an issuer for other processes.
func Main() {
	address := os.Getenv(Env)
	if address == "" {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	if err := run(ctx, address); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	stop()
	os.Exit(0)
}

func run(ctx context.Context, address string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	i, err := New("http://"+l.Addr().String(), time.Now)
	if err != nil {
		return err
	}
	fmt.Println(i.URL())
	return i.Serve(ctx, l)
}
