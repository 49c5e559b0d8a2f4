// Package secrets resolves secret references with this process's own credentials.
package secrets

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// MaxBytes is the longest secret.
const MaxBytes = 64 << 10

// Resolve returns the values by the names that the handler asks for, or a *codes.Failure, which names the reference and
// never a value. It may block on a slow file system.
//
// env: an environment variable, but none of our own settings. file: a file in folder, without its last line end.
func Resolve(references map[string]*rarav1.SecretRef, folder string) (map[string]string, error) {
	values := make(map[string]string, len(references))
	for name, reference := range references {
		value, err := one(reference, folder)
		if err != nil {
			message := fmt.Sprintf("secret %q (%s: %q): %v", name, reference.Provider, reference.Name, err)
			return nil, &codes.Failure{Code: codes.SecretUnresolved, Message: message}
		}
		values[name] = value
	}
	return values, nil
}

func one(reference *rarav1.SecretRef, folder string) (string, error) {
	if reference.Version != "" {
		return "", errors.New("this provider knows no versions")
	}
	var value string
	var err error
	switch reference.Provider {
	case "env":
		value, err = fromEnvironment(reference.Name)
	case "file":
		value, err = fromFile(reference.Name, folder)
	default:
		return "", errors.New("no such provider here; there are env and file")
	}
	if err == nil && !utf8.ValidString(value) {
		return "", errors.New("it is not UTF-8")
	}
	return value, err
}

func fromEnvironment(name string) (string, error) {
	if strings.HasPrefix(name, "RARA_") {
		return "", errors.New("the executor's own settings are no secrets of a step")
	}
	value, ok := os.LookupEnv(name)
	if !ok {
		return "", errors.New("the variable is not set")
	}
	return value, nil
}

// fromFile opens below folder alone: neither `..` nor a symbolic link leads out of it.
func fromFile(name, folder string) (string, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return "", reason(err)
	}
	defer root.Close()
	file, err := root.Open(name)
	if err != nil {
		return "", reason(err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, MaxBytes+1))
	if err != nil {
		return "", reason(err)
	}
	if len(data) > MaxBytes {
		return "", fmt.Errorf("over %d bytes", MaxBytes)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r"), nil
}

// reason is the error without the path, which the message names already.
func reason(err error) error {
	var at *os.PathError
	if errors.As(err, &at) {
		return at.Err
	}
	return err
}
