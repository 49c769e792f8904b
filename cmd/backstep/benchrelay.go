package main

import "github.com/spf13/cobra"

func newBenchRelay() *cobra.Command { return &cobra.Command{Use: "relay"} }
