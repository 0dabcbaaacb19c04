package logsink

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

const canSyncFileSystem = true

// syncFileSystem makes everything on the file system of dir safe.
func syncFileSystem(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}
