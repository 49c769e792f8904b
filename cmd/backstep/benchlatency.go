package main

import "github.com/spf13/cobra"

func newBenchLatency() *cobra.Command { return &cobra.Command{Use: "latency"} }
