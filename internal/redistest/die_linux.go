package redistest

import (
	"os/exec"
	"syscall"
)

// dieWithParent makes the server end with the test binary, however that ends:
// a test that runs into its time limit runs no cleanups.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
