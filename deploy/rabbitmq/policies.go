// Package rabbitmq holds what an operator tunes on the broker. The files are in the format of
// definitions, so that "rabbitmqctl import_definitions" takes them as well as
// "backstep topology apply" does.
package rabbitmq

import _ "embed" // the policy files

// Policies are for RabbitMQ 3.10 and later. They limit crash loops (a message whose delivery
// failed more than 20 times is parked) and the length of queues (a full one refuses new
// messages and the relay keeps them).
//
//go:embed policies.json
var Policies []byte

// Policies431 are for RabbitMQ 4.3.1 and later, instead of Policies: the same, and what older
// brokers refuse. A delivery that failed waits before it comes back, and a consumer that does
// not ack in time loses its deliveries.
//
//go:embed policies-4.3.1.json
var Policies431 []byte
