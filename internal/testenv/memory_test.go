package testenv

import "testing"

func TestInMemory(t *testing.T) {
	t.Setenv("TMPDIR", "")
	if dir := inMemory(); dir != "" && dir != memoryDir {
		t.Errorf("servers go to %q", dir)
	}
	t.Setenv("TMPDIR", t.TempDir())
	if dir := inMemory(); dir != "" {
		t.Errorf("servers go to %q, although TMPDIR says where", dir)
	}
}
