// Package sagatest tests definitions of sagas on a real database, with a clock that a test sets
// and without a broker.
//
// A World is the engine, the outbox and the inbox of a test's own database. Messages are taken
// from the tables where the relay would take them, and each is handed to the engine as a lane
// does: in a transaction that records it too. Services that remote steps are for are functions
// (Participant). Time passes only in Advance, and in Run as far as a retry needs it.
//
// Certify runs a saga again and again, each time with something that can happen to it: a worker
// that crashes before or after its commit, a copy, a message that is late, a reply that is lost, a
// step that fails or refuses, somebody who cancels, an operator who has it undone; one at every place where it can happen, then
// two. Whatever happens, the saga has to end and the caller's invariant has to hold. If it does not,
// the shortest way there is told in words.
//
// What it cannot find: what only happens when two sagas run at the same time, what an operator's skip or
// resolve leads to, and what a step does to systems that are neither in the database nor a fake that Setup
// empties and Check looks at.
package sagatest
