package sqltx

import "testing"

func TestTestedServers(t *testing.T) {
	tests := []struct {
		version, comment string
		want             bool
	}{
		{"8.0.16", "MySQL Community Server - GPL", true},
		{"8.0.15", "MySQL Community Server - GPL", false},
		{"8.4.11", "MySQL Community Server - GPL", true},
		{"9.7.4", "(Debian)", true},
		{"5.7.44", "MySQL Community Server (GPL)", false},
		{"10.11.19-MariaDB-0+deb12u1-log", "Debian 12", true},
		{"5.5.5-10.6.1-MariaDB", "mariadb.org binary distribution", true},
		{"10.5.9-MariaDB", "", false},
		{"8.0.11-TiDB-v7.5.0", "TiDB Server (Apache License 2.0)", false},
		{"nonsense", "", false},
	}
	for _, tt := range tests {
		if got := tested(tt.version, tt.comment); got != tt.want {
			t.Errorf("tested(%q, %q) = %t, want %t", tt.version, tt.comment, got, tt.want)
		}
	}
}
