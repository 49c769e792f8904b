package app

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/kelseyhightower/envconfig"
)

// field is one variable of a configuration struct.
type field struct {
	name   string // of the variable
	prefix string // what of the name comes from the groups the field is in
	def    reflect.StructField
	value  reflect.Value
}

// fields returns those of a struct and of the groups in it.
func fields(prefix string, s reflect.Value) []field {
	var all []field
	for i := range s.NumField() {
		def := s.Type().Field(i)
		switch {
		case group(def.Type) && def.Anonymous:
			all = append(all, fields(prefix, s.Field(i))...)
		case group(def.Type):
			all = append(all, fields(prefix+"_"+strings.ToUpper(def.Name), s.Field(i))...)
		default:
			f := field{prefix: prefix, def: def, value: s.Field(i)}
			if def.Tag.Get("envconfig") != "" {
				panic(def.Name + ": no envconfig tag: the variable without prefix would be read too")
			}
			f.name = f.variable()
			f.bounds() // panics if it has none and needs them
			all = append(all, f)
		}
	}
	return all
}

// group reports whether a field is a struct of further fields, not a value of its own.
func group(t reflect.Type) bool {
	if t.Kind() != reflect.Struct {
		return false
	}
	_, value := reflect.New(t).Interface().(interface{ UnmarshalText([]byte) error })
	return !value
}

// alone is a struct with this field only, because envconfig stops at the first fault.
func (f field) alone() reflect.Value {
	return reflect.New(reflect.StructOf([]reflect.StructField{f.def}))
}

// variable asks envconfig for the name, so that there is one rule for it.
func (f field) variable() string {
	var b strings.Builder
	if err := envconfig.Usagef(f.prefix, f.alone().Interface(), &b, `{{range .}}{{usage_key .}}{{end}}`); err != nil {
		panic(err) // the struct's tags are wrong
	}
	return b.String()
}

// read sets the field from the environment, or returns what is wrong with the variable.
func (f field) read(needs []string) error {
	name, value, err := f.lookUp()
	if err != nil {
		return err
	}
	if name == "" {
		if f.def.Tag.Get("required") == "true" || slices.Contains(needs, f.name) {
			return fmt.Errorf("%s is not set%s", f.name, f.example())
		}
	} else if odd := oddity(value); odd != "" {
		return fmt.Errorf("%s %s%s", name, odd, f.example())
	}
	one := f.alone()
	if name != "" && name != f.name {
		// Where envconfig looks, and no longer than it does: it is nothing for our children.
		if err := os.Setenv(f.name, value); err != nil {
			return fmt.Errorf("%s contains what no variable can", name)
		}
		defer os.Unsetenv(f.name) //nolint:errcheck // it has just been set
	}
	err = envconfig.Process(f.prefix, one.Interface())
	if name == "" {
		value = f.def.Tag.Get("default")
	}
	switch got := one.Elem().Field(0); {
	case err == nil && (f.inRange(got, value) || name == "" && value == ""):
		f.value.Set(got)
		return nil
	case name == "":
		panic(fmt.Sprintf("%s: default tag %q: %v", f.name, value, err))
	}
	return f.fault(value)
}

// lookUp returns the variable that is set, this or <name>_FILE, or "" for the name; and its
// value, or what is in the file.
func (f field) lookUp() (name, value string, err error) {
	value, set := os.LookupEnv(f.name)
	path, file := os.LookupEnv(f.name + "_FILE")
	switch {
	case !file || !slices.Contains(secrets, f.name):
		if !set {
			return "", "", nil
		}
		return f.name, value, nil
	case set:
		return "", "", fmt.Errorf("%s and %s_FILE are both set; unset one", f.name, f.name)
	}
	name = f.name + "_FILE"
	if odd := oddity(path); odd != "" {
		return "", "", fmt.Errorf("%s %s", name, odd)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", name, err)
	}
	value = strings.TrimRight(string(content), "\r\n") // an editor's, or echo's
	if odd := oddity(value); odd != "" {
		return "", "", fmt.Errorf("%s: what is in %s %s", name, path, odd)
	}
	return name, value, nil
}

// oddity says why a value cannot be meant, or "". Set but empty is not the same as unset: it
// comes from a template whose own variable was missing.
func oddity(value string) string {
	const bom = "\ufeff"
	switch trimmed := strings.TrimSpace(value); {
	case value == "":
		return "is empty"
	case trimmed == "":
		return "is blank"
	case strings.HasPrefix(value, bom):
		return "starts with a byte order mark; save it without one"
	case strings.ContainsAny(trimmed[:1], `"'`) && (len(trimmed) == 1 || trimmed[len(trimmed)-1] == trimmed[0]):
		return "is in quotes; they would be part of the value, so leave them out"
	case strings.ContainsFunc(value, unicode.IsControl):
		return "contains a line break, a tab or another control character"
	case trimmed != value:
		return "starts or ends with a blank"
	}
	return ""
}

func (f field) example() string {
	if e := f.def.Tag.Get("example"); e != "" {
		return "; it looks like " + e
	}
	return ""
}

var (
	intType      = reflect.TypeFor[int]()
	boolType     = reflect.TypeFor[bool]()
	durationType = reflect.TypeFor[time.Duration]()
)

func (f field) is(t reflect.Type) bool { return f.def.Type == t }

// limits returns the two ends of the range tag.
func (f field) limits() (low, high string) {
	low, high, _ = strings.Cut(f.def.Tag.Get("range"), " to ")
	return low, high
}

// bounds returns the ends of the range as numbers; of durations, in nanoseconds. ok is false
// for what is no number.
func (f field) bounds() (low, high int64, ok bool) {
	l, h := f.limits()
	var errLow, errHigh error
	switch {
	case f.is(durationType):
		var dl, dh time.Duration
		dl, errLow = time.ParseDuration(l)
		dh, errHigh = time.ParseDuration(h)
		low, high = int64(dl), int64(dh)
	case f.is(intType):
		low, errLow = strconv.ParseInt(l, 10, 64)
		high, errHigh = strconv.ParseInt(h, 10, 64)
	case f.value.CanInt() && f.def.Type.PkgPath() == "", f.value.CanUint(), f.value.CanFloat():
		panic(f.name + ": use int or time.Duration")
	default:
		return 0, 0, false
	}
	if err := errors.Join(errLow, errHigh); err != nil || low > high {
		panic(fmt.Sprintf("%s: range tag %q", f.name, f.def.Tag.Get("range")))
	}
	return low, high, true
}

// inRange also refuses other notations of numbers: 010 would be 8.
func (f field) inRange(got reflect.Value, value string) bool {
	low, high, ok := f.bounds()
	if !ok {
		return true
	}
	n := got.Int()
	if f.is(intType) && strconv.FormatInt(n, 10) != value {
		return false
	}
	return low <= n && n <= high
}

// fault says what a value should be. A secret is not quoted.
func (f field) fault(value string) error {
	if slices.Contains(secrets, f.name) {
		return fmt.Errorf("%s cannot be read%s", f.name, f.example())
	}
	return fmt.Errorf("%s is %s; it must be %s", f.name, Quote(value), f.expected())
}

// Quote quotes as much of a value as a message has room for.
func Quote(value string) string {
	const most = 40
	if len(value) > most {
		value = strings.ToValidUTF8(value[:most], "") + "…"
	}
	return strconv.Quote(value)
}

func (f field) expected() string {
	low, high := f.limits()
	such := cmp.Or(f.def.Tag.Get("default"), f.def.Tag.Get("example"))
	switch {
	case f.is(durationType):
		return fmt.Sprintf("a time from %s to %s, such as %s (units: h, m, s, ms)", low, high, such)
	case f.is(intType):
		return fmt.Sprintf("a whole number from %s to %s, such as %s", low, high, such)
	case f.is(boolType):
		return "true or false"
	}
	return f.def.Tag.Get("range")
}
