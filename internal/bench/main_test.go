package bench

import (
	"testing"

	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
