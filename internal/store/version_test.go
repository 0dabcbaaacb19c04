package store

import "testing"

// Servers before 7.0 are refused at start; what is no version at all is given the benefit of the doubt.
func TestAtLeast(t *testing.T) {
	t.Parallel()
	for v, want := range map[string]bool{"7.0.15": true, "7.2.5": true, "8.0.1": true, "10.0.0": true, "6.2.14": false, "6.9": false, "5.0.7": false, "unknown": true} {
		if got := atLeast(v, 7, 0); got != want {
			t.Errorf("%s: %v, want %v", v, got, want)
		}
	}
}
