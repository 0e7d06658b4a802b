package fabric

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	for env, run := range map[string]func(string) error{readerEnv: readAsChild, benchEnv: benchPrefill} {
		if v := os.Getenv(env); v != "" {
			if err := run(v); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	goleak.VerifyTestMain(m)
}
