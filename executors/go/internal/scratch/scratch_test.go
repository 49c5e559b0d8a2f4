package scratch_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/scratch"
)

func TestOnlyWhatDeadExecutorsLeftIsRemoved(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dead := filepath.Join(root, "jobs", "dead")
	if err := os.MkdirAll(filepath.Join(dead, "7"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dead, "lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	first, err := scratch.Open(root, "first")
	if err != nil {
		t.Fatal(err)
	}
	second, err := scratch.Open(root, "second")
	if err != nil {
		t.Fatal(err)
	}
	exists := func(path string) bool { _, err := os.Stat(path); return err == nil }
	if exists(dead) || !exists(first.Jobs) || !exists(second.Jobs) || first.Cache != second.Cache {
		t.Errorf("dead: %v, first: %v, second: %v", exists(dead), exists(first.Jobs), exists(second.Jobs))
	}
	first.Close()
	first.Close()
	if exists(first.Jobs) || !exists(second.Jobs) || !exists(second.Cache) {
		t.Error("an executor removes its own folder, and no other")
	}
	second.Close()
	if _, err := scratch.Open("/proc/nothing", "third"); err == nil {
		t.Error("a folder that cannot be made is an error")
	}
}
