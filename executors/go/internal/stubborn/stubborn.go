// Package stubborn has operations that do not end by themselves, and not all of them when they are asked to.
package stubborn

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

const (
	version = "1.0.0"
	forever = 600 * time.Second
	look    = 20 * time.Millisecond
)

// Register offers all of them.
func Register(registry *rara.Registry) {
	rara.Register(registry, "stubborn.cooperates", version, cooperates)
	rara.Register(registry, "stubborn.leaks", version, leaks)
	rara.Register(registry, "stubborn.process", version, process, rara.OwnProcess())
	rara.Register(registry, "stubborn.children", version, children, rara.OwnProcess())
}

type given struct {
	Folder string `json:"folder"`
}

type job = rara.Job[given]

// started appends a line to `<folder>/<step name>`: the attempt, and the numbers of the processes that are to end with it.
func started(job *job, pids ...int) error {
	line, err := json.Marshal(map[string]any{"attempt": job.Attempt, "pids": append([]int{}, pids...)})
	if err != nil {
		return err
	}
	return appendTo(filepath.Join(job.Input.Folder, job.StepName), string(line)+"\n")
}

func appendTo(path, text string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.WriteString(text)
	return err
}

// cooperates ends when it is asked to.
func cooperates(ctx context.Context, job *job) (any, error) {
	if err := started(job); err != nil {
		return nil, err
	}
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// leaks runs on where nothing can end it, until there is a file `<step name>.go` in the folder. Then it says whatever it
// can, writes down to `<step name>.said` what became of that, and succeeds.
func leaks(ctx context.Context, job *job) (any, error) {
	if err := started(job); err != nil {
		return nil, err
	}
	path := filepath.Join(job.Input.Folder, job.StepName)
	for ; ; time.Sleep(look) {
		if _, err := os.Stat(path + ".go"); err == nil {
			break
		}
	}
	progress := job.Progress(rara.Progress{Message: "late", Checkpoint: "late"})
	_, once := rara.Once(ctx, job.AnyJob, "late", func(context.Context) (string, error) { return "late", nil })
	_, artifact := job.Artifacts.PutBytes(context.WithoutCancel(ctx), "late", []byte("late"), rara.Output{})
	said := fmt.Sprintf("reason %s\nprogress %v\nonce %v\nartifact %v\n",
		rara.CancelReason(ctx), progress, once, artifact)
	if err := os.WriteFile(path+".part", []byte(said), 0o644); err != nil {
		return nil, err
	}
	return "late", os.Rename(path+".part", path+".said")
}

// process sleeps on.
func process(_ context.Context, job *job) (any, error) {
	if err := started(job, os.Getpid()); err != nil {
		return nil, err
	}
	time.Sleep(forever)
	return nil, nil
}

// children has a child that ignores SIGTERM, and a grandchild.
func children(_ context.Context, job *job) (any, error) {
	child := exec.Command("sh", "-c", `trap "" TERM; sleep 600 & echo $!; wait`)
	out, err := child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := child.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, err
	}
	grandchild, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		return nil, err
	}
	if err := started(job, os.Getpid(), child.Process.Pid, grandchild); err != nil {
		return nil, err
	}
	time.Sleep(forever)
	return nil, nil
}
