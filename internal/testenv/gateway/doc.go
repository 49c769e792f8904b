// Package gateway is a payment service as others run it, for tests and demonstrations: it speaks
// HTTP, takes all requests with one Idempotency-Key for one, keeps its ledger in memory, and goes
// wrong on demand.
//
//	POST /charges           {"order", "amount_cents", "token"}      201 charged, 402 declined
//	GET  /charges/{key}                                             200 with its status, 404
//	POST /refunds           {"order", "amount_cents", "charge_key"} 201 refunded, or voided: it knows
//	                                                                no such charge, and will decline it
//	GET  /ledger            all charges and refunds
//	POST /faults            {"fault", "on", "times", "delay_ms"}    what goes wrong from now on: a Kind,
//	                                                                or none; 204, or 400 and why not
//
// A token that starts with "decline" is declined.
package gateway
