// Package realserver starts servers of this checkout, for tests.
package realserver

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// repository is the top of the clone; its .venv, made by `make setup`, has server and Python client.
func repository() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..", "..")
}

// Tool returns the path of a program of the virtual environment.
func Tool(t testing.TB, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join(repository(), ".venv", "bin", name))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("`make setup` first: %v", err)
	}
	return path
}

// Start starts a real server with a directory of its own; it ends with the test.
func Start(t testing.TB, flags ...string) (address string) {
	t.Helper()
	directory, err := os.MkdirTemp("/tmp", "pion-") // short: a path of a Unix socket has 104 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	arguments := []string{"serve", "--data", filepath.Join(directory, "data"), "--listen", "127.0.0.1:0", "--drain-ms", "0"}
	command := exec.Command(Tool(t, "pion-grpc"), append(arguments, flags...)...)
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	command.Stderr = command.Stdout
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ready, log := make(chan string, 1), &strings.Builder{}
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(output); lines.Scan(); {
			log.WriteString(lines.Text() + "\n")
			var entry struct{ Event, GRPC string }
			if json.Unmarshal(lines.Bytes(), &entry) == nil && entry.Event == "ready" {
				ready <- entry.GRPC
			}
		}
		close(ready)
	})
	t.Cleanup(func() {
		command.Process.Signal(syscall.SIGTERM)
		reading.Wait()
		if err := command.Wait(); err != nil {
			t.Errorf("the server ended with %v:\n%s", err, log)
		}
	})
	select {
	case address = <-ready:
	case <-time.After(30 * time.Second):
	}
	if address == "" {
		command.Process.Kill()
		reading.Wait()
		t.Fatalf("the server did not start:\n%s", log)
	}
	return address
}
