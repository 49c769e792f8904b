package amqp

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/rabbitmq/amqp091-go"
)

const schemeTLS = "amqps"

// withoutTLS returns the URL for amqp091, which would put TLS between itself and what reads the
// frames for it.
func withoutTLS(raw string) string { return strings.Replace(raw, schemeTLS+"://", "amqp://", 1) }

// secure returns nc with TLS if the URL asks for it, and as the URL says: the authorities to
// trust, and a certificate and a name of the server's, if they are given.
func secure(ctx context.Context, nc net.Conn, uri amqp091.URI) (net.Conn, error) {
	if uri.Scheme != schemeTLS {
		return nc, nil
	}
	cfg := &tls.Config{ServerName: cmp.Or(uri.ServerName, uri.Host), MinVersion: tls.VersionTLS12}
	if uri.CACertFile != "" {
		pem, err := os.ReadFile(uri.CACertFile)
		if err != nil {
			return nil, fmt.Errorf("read the certificates to trust (cacertfile): %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("file %s (cacertfile) has no certificate", uri.CACertFile)
		}
	}
	if uri.CertFile != "" && uri.KeyFile != "" {
		own, err := tls.LoadX509KeyPair(uri.CertFile, uri.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("read our certificate (certfile, keyfile): %w", err)
		}
		cfg.Certificates = []tls.Certificate{own}
	}
	secured := tls.Client(nc, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return secured, nil
}
