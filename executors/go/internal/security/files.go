// Package security holds how an executor reaches a scheduler and who reaches it: TLS, certificates, tokens. Files are
// read again when they change, so that nothing has to be renewed by a restart.
package security

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
)

// System stands for the machine's own authorities, instead of a file.
const System = "system"

// state is what changes when the content of a file does.
type state struct {
	modified time.Time
	size     int64
}

// watched is something read from files, and read again when one of them has changed. What cannot be used leaves what
// was read before in use.
type watched[T any] struct {
	files []string
	read  func() (T, error)
	tell  func(error) // of each change: what is wrong with it, or nil

	mu    sync.Mutex
	seen  []state
	value T
}

// watch reads for the first time.
func watch[T any](read func() (T, error), tell func(error), files ...string) (*watched[T], error) {
	w := &watched[T]{read: read, tell: tell}
	for _, file := range files {
		if file != "" && file != System {
			w.files = append(w.files, file)
		}
	}
	var err error
	if w.seen, err = w.look(); err != nil {
		return nil, err
	}
	w.value, err = read()
	return w, err
}

func (w *watched[T]) look() ([]state, error) {
	states := make([]state, len(w.files))
	for i, file := range w.files {
		info, err := os.Stat(file)
		if err != nil {
			return nil, err
		}
		states[i] = state{info.ModTime(), info.Size()}
	}
	return states, nil
}

// get is what the files say now.
func (w *watched[T]) get() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	states, err := w.look()
	if err == nil && !changed(w.seen, states) {
		return w.value
	}
	var value T
	if err == nil {
		w.seen = states
		value, err = w.read()
	}
	w.tell(err)
	if err == nil {
		w.value = value
	}
	return w.value
}

func changed(before, after []state) bool {
	for i := range after {
		if !before[i].modified.Equal(after[i].modified) || before[i].size != after[i].size {
			return true
		}
	}
	return false
}

// authorities are the certificates of a file; nil, which stands for the machine's own, for System.
func authorities(file string) (*x509.CertPool, error) {
	if file == System {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s holds no certificates of authorities", file)
	}
	return pool, nil
}

// pair is a certificate with its key; none where no file is named.
func pair(certificate, key string) ([]tls.Certificate, error) {
	if certificate == "" {
		return nil, nil
	}
	both, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("%s and %s are no certificate and its key: %w", certificate, key, err)
	}
	return []tls.Certificate{both}, nil
}

// tokens are the lines of a file.
func tokens(file string) ([]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	lines := strings.Fields(string(text))
	if len(lines) == 0 {
		return nil, fmt.Errorf("there is no token in %s", file)
	}
	return lines, nil
}
