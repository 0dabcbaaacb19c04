//go:build !linux

package redistest

import "os/exec"

// dieWithParent does nothing where the system has no parent-death signal: a
// test binary that is killed leaves its server behind.
func dieWithParent(*exec.Cmd) {}
