package api_test

import (
	"testing"

	"github.com/millrace/millrace/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }
