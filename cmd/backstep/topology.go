package main

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
)

// applied is what topology apply did.
type applied struct {
	Vhost    string   `json:"vhost"`
	Queues   []string `json:"queues"`
	Policies []string `json:"policies"`
}

func newTopologyApply() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Declare exchanges and queues, and put the policies",
		Long: `Declares exchanges, queues and bindings on the broker in BACKSTEP_AMQP_URL; what exists stays as
it is. If BACKSTEP_AMQP_MANAGEMENT_URL is set, the policies (delivery limit, lengths) are put as
well. It is safe to run again. The user needs the right to configure.`,
		Example: `  BACKSTEP_AMQP_URL='amqp://admin:secret@127.0.0.1:5672/backstep' \
  BACKSTEP_AMQP_MANAGEMENT_URL='http://127.0.0.1:15672' backstep topology apply`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			c, err := loadConfig(needsAMQP)
			if err != nil {
				return err
			}
			did, err := applyTopology(cmd.Context(), c)
			if err != nil {
				return err
			}
			if len(did.Policies) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "backstep: the policies were not put, because BACKSTEP_AMQP_MANAGEMENT_URL is not set; "+
					"it looks like http://127.0.0.1:15672")
			}
			out := cmd.OutOrStdout()
			if asJSON {
				return printJSON(out, did)
			}
			fmt.Fprintf(out, "virtual host %s: exchanges and queues are there: %s, each with its .parked\n",
				did.Vhost, strings.Join(did.Queues, ", "))
			if len(did.Policies) > 0 {
				fmt.Fprintln(out, "policies put:", strings.Join(did.Policies, ", "))
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what was done as JSON")
	return cmd
}

func applyTopology(ctx context.Context, c config) (applied, error) {
	b, err := c.connect(ctx)
	if err != nil {
		return applied{}, err
	}
	defer b.close()
	s, err := b.client.Session(ctx)
	if err != nil {
		return applied{}, err
	}
	did := applied{Queues: handlers.Queues, Policies: []string{}}
	if did.Vhost, err = vhost(c.AMQP.URL); err != nil {
		return did, err
	}
	if err := (amqp.Topology{Queues: did.Queues}).Declare(ctx, s); err != nil {
		return did, err
	}
	if c.AMQP.ManagementURL == "" {
		return did, nil
	}
	management, err := withCredentials(c.AMQP.ManagementURL, c.AMQP.URL)
	if err != nil {
		return did, err
	}
	did.Policies, err = amqp.ApplyPolicies(ctx, management, did.Vhost, did.Queues...)
	if err != nil {
		return did, fmt.Errorf("exchanges and queues are there, but the policies could not be put: %w; is BACKSTEP_AMQP_MANAGEMENT_URL right?", err)
	}
	return did, nil
}

// withCredentials returns the management URL with the user of the AMQP URL if it has none.
func withCredentials(management, amqpURL string) (string, error) {
	m, err := url.Parse(management)
	if err != nil {
		return "", usagef("BACKSTEP_AMQP_MANAGEMENT_URL: it is not a URL") // err would quote the password
	}
	if m.User == nil {
		a, err := url.Parse(amqpURL)
		if err != nil {
			return "", usagef("BACKSTEP_AMQP_URL: it is not a URL")
		}
		if m.User = a.User; m.User == nil {
			m.User = url.UserPassword("guest", "guest") // as AMQP clients do
		}
	}
	return m.String(), nil
}
