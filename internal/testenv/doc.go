// Package testenv gives tests, the demo and the benchmark a real MySQL (or MariaDB) and a
// real RabbitMQ: those it is told about, or private ones that it starts and that never
// outlive the process that started them.
package testenv
