// Package bench measures: how fast the broker and the database are without us, which are the
// ceilings that the benchmarks of cmd/backstep quote their ratios to, and what each process
// costs. A ceiling is only worth something in the same run, on the same servers.
package bench
