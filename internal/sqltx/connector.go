package sqltx

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
)

// connector opens connections at READ COMMITTED. Without a transaction of its own a statement
// locks no gap either, and a transaction need not ask for it each time, in a round trip.
type connector struct{ driver.Connector }

// No setting of the DSN does it: the variable's name is not the same on all servers.
const readCommittedSQL = `SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED`

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.(driver.ExecerContext).ExecContext(ctx, readCommittedSQL, nil); err != nil {
		return nil, errors.Join(fmt.Errorf("set the isolation level: %w", err), conn.Close())
	}
	return conn, nil
}
