package app

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/kelseyhightower/envconfig"
)

// Prefix is that of every environment variable.
const Prefix = "BACKSTEP"

// Variables are all that some Backstep binary knows. One environment often serves several, so
// a binary accepts those of the others and refuses what none of them knows: a misspelt name
// would otherwise be a default nobody asked for. Each binary's tests hold its own against
// this list.
var Variables = []string{
	"BACKSTEP_ADMIN_ADDR",
	"BACKSTEP_ALLOW_UNTESTED_SERVER",
	"BACKSTEP_AMQP_MANAGEMENT_URL",
	"BACKSTEP_AMQP_URL",
	"BACKSTEP_BATCH",
	"BACKSTEP_INBOX_RETENTION",
	"BACKSTEP_LANES",
	"BACKSTEP_LOG_LEVEL",
	"BACKSTEP_MAX_BODY",
	"BACKSTEP_MYSQL_DSN",
	"BACKSTEP_QUEUES",
	"BACKSTEP_RELAY_LEASE_TTL",
	"BACKSTEP_RELAY_PARK_AFTER",
	"BACKSTEP_RELAY_WINDOW",
}

// secrets hold passwords. Each can be given as a file, <name>_FILE, as mounted secrets are.
var secrets = []string{"BACKSTEP_AMQP_MANAGEMENT_URL", "BACKSTEP_AMQP_URL", "BACKSTEP_MYSQL_DSN"}

// Load reads the environment into cfg, a pointer to a struct with envconfig tags, and reports
// all faults at once: unreadable secrets, values that do not parse, what is missing, what
// cfg's Validate says, and unknown variables.
func Load(cfg any) error {
	errs := []error{readSecrets(), unknown()}
	// Field by field, because envconfig stops at the first fault.
	errs = append(errs, process(Prefix, reflect.ValueOf(cfg).Elem())...)
	if err := errors.Join(errs...); err != nil {
		return faults(err)
	}
	if v, ok := cfg.(interface{ Validate() error }); ok {
		if err := v.Validate(); err != nil {
			return faults(err)
		}
	}
	return nil
}

func faults(err error) error {
	lines := strings.ReplaceAll(err.Error(), "\n", "\n  ")
	return fmt.Errorf("configuration:\n  %s\n--help lists the variables", lines)
}

// readSecrets puts the content of each <name>_FILE where <name> is read from.
func readSecrets() error {
	var errs []error
	for _, name := range secrets {
		path, given := os.LookupEnv(name + "_FILE")
		if !given {
			continue
		}
		if _, both := os.LookupEnv(name); both {
			errs = append(errs, fmt.Errorf("%s and %s_FILE are both set; unset one", name, name))
			continue
		}
		content, err := os.ReadFile(path)
		if err == nil {
			err = os.Setenv(name, strings.TrimRight(string(content), "\r\n"))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s_FILE: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func unknown() error {
	var errs []error
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, Prefix+"_") || slices.Contains(Variables, name) {
			continue
		}
		if secret, ok := strings.CutSuffix(name, "_FILE"); ok && slices.Contains(secrets, secret) {
			continue
		}
		errs = append(errs, fmt.Errorf("%s is not a variable of Backstep", name))
	}
	return errors.Join(errs...)
}

// process reads each field of a struct by itself and returns the faults of all.
func process(prefix string, s reflect.Value) []error {
	var errs []error
	for i := range s.NumField() {
		field := s.Type().Field(i)
		if group(field.Type) {
			inner := prefix
			if !field.Anonymous {
				inner += "_" + strings.ToUpper(field.Name)
			}
			errs = append(errs, process(inner, s.Field(i))...)
			continue
		}
		one := reflect.New(reflect.StructOf([]reflect.StructField{field}))
		if err := envconfig.Process(prefix, one.Interface()); err != nil {
			errs = append(errs, fault(err))
			continue
		}
		s.Field(i).Set(one.Elem().Field(0))
	}
	return errs
}

// fault is err in our words.
func fault(err error) error {
	if pe, ok := errors.AsType[*envconfig.ParseError](err); ok {
		return fmt.Errorf("%s is %q, which is not a %s", pe.KeyName, pe.Value, pe.TypeName)
	}
	return errors.New(strings.Replace(err.Error(), "required key ", "", 1)) // "… missing value"
}

// group reports whether a field is a struct of further fields, not a value of its own.
func group(t reflect.Type) bool {
	if t.Kind() != reflect.Struct {
		return false
	}
	_, value := reflect.New(t).Interface().(interface{ UnmarshalText([]byte) error })
	return !value
}

// Names returns the variables that cfg, a pointer to a struct, is read from.
func Names(cfg any) []string { return names(Prefix, reflect.TypeOf(cfg).Elem()) }

func names(prefix string, t reflect.Type) []string {
	var all []string
	for field := range t.Fields() {
		switch {
		case group(field.Type) && field.Anonymous:
			all = append(all, names(prefix, field.Type)...)
		case group(field.Type):
			all = append(all, names(prefix+"_"+strings.ToUpper(field.Name), field.Type)...)
		default:
			all = append(all, variable(prefix, field))
		}
	}
	return all
}

// variable asks envconfig for the name, so that there is one rule for it.
func variable(prefix string, field reflect.StructField) string {
	one := reflect.New(reflect.StructOf([]reflect.StructField{field}))
	var b strings.Builder
	if err := envconfig.Usagef(prefix, one.Interface(), &b, `{{range .}}{{usage_key .}}{{end}}`); err != nil {
		panic(err) // the struct's tags are wrong
	}
	return b.String()
}
