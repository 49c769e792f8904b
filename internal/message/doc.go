// Package message holds the plain values every other package talks in: a Message as it
// travels over AMQP 0-9-1, a Delivery as a consumer receives it, the Outcome a handler
// gives for it, and the Result a publisher reports. It imports nothing of ours and knows
// neither a broker client nor a database.
//
// docs/messages.md is the contract for writers in other languages.
package message
