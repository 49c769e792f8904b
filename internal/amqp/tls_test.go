package amqp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/testenv"
)

// TestTLS talks to the broker through a proxy that ends TLS, and only if its certificate is
// signed by whom the URL says.
func TestTLS(t *testing.T) {
	b := testenv.Vhost(t)
	declare(t, start(t, Config{URL: b.URL}), "orders")
	proxy, cert := tlsProxy(t, b.URL)
	c := start(t, Config{URL: proxy + "?cacertfile=" + url.QueryEscape(cert)})
	fill(t, c, "orders", 100)
	sub := subscribe(t, c, "orders", 100)
	for range 100 {
		receive(t, sub)
	}
	if err := sub.Ack(100, true); err != nil {
		t.Fatal(err)
	}
	// Frames are looked at inside of it.
	p := amqp091.Publishing{Headers: numbered(10_000), Body: []byte("body")}
	if err := channel(t, start(t, Config{URL: b.URL})).Publish("", "orders", false, false, p); err != nil {
		t.Fatal(err)
	}
	if d := receive(t, sub); d.Unreadable == "" || string(d.Body) != "body" {
		t.Errorf("a message with headers that cannot be read: %q, %q", d.Unreadable, d.Body)
	}
	distrustful := start(t, Config{URL: proxy})
	until(t, distrustful, func() bool { return strings.Contains(distrustful.State(), "certificate") })
}

// tlsProxy returns the broker's URL with TLS and the file with the certificate to trust.
func tlsProxy(t *testing.T, broker string) (proxyURL, certFile string) {
	t.Helper()
	u, err := url.Parse(broker)
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	cert, certFile := selfSigned(t)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", target)
			if err != nil {
				t.Error(err)
				return
			}
			for _, ends := range [][2]net.Conn{{in, out}, {out, in}} {
				wg.Go(func() {
					_, _ = io.Copy(ends[0], ends[1]) // until either closes
					_, _ = ends[0].Close(), ends[1].Close()
				})
			}
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	u.Scheme, u.Host = "amqps", l.Addr().String()
	return u.String(), certFile
}

func selfSigned(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}
