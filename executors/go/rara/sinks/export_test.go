package sinks

import (
	"context"
	"os"
	"path/filepath"
)

// HoldLock holds what writers of path lock, from inside to release.
func HoldLock(path string, inside, release chan struct{}) error {
	folder, name := filepath.Split(path)
	fence, err := os.OpenFile(filepath.Join(folder, "."+name+".fence"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	defer fence.Close()
	err = lock(context.Background(), fence, path)
	close(inside)
	<-release
	return err
}
