package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// programs are the files that private processes need, under their names on this machine.
type programs struct {
	root   root // the system they belong to
	mysql  mysqlPrograms
	rabbit rabbitPrograms
}

// findPrograms finds the files for the servers that s does not have yet. If some are not
// there, it installs them, if that can be done on this machine.
func (s *Servers) findPrograms(ctx context.Context, o Options) (programs, error) {
	files, packages, err := s.lookUp(ctx, "", newSearchPath(o.Path))
	if err == nil {
		return files, nil
	}
	if e := install(ctx, newSearchPath(o.Path), o.log(), packages...); e != nil {
		return programs{}, errors.Join(err, e)
	}
	files, _, err = s.lookUp(ctx, "", newSearchPath(o.Path)) // anew: RabbitMQ's folder has its version in its name
	return files, err
}

// lookUp also returns the packages that have what it did not find.
func (s *Servers) lookUp(ctx context.Context, r root, path searchPath) (files programs, packages []string, err error) {
	files.root = r
	var errMySQL, errRabbit error
	if s.database == nil {
		if files.mysql, errMySQL = findMySQL(ctx, r, path); errMySQL != nil {
			packages = append(packages, "mariadb-server")
		}
	}
	if s.broker == nil {
		if files.rabbit, errRabbit = findRabbitMQ(path); errRabbit != nil {
			packages = append(packages, "rabbitmq-server")
		}
	}
	return files, packages, errors.Join(errMySQL, errRabbit)
}

// searchPath lists the folders in which programs are looked for.
type searchPath []string

func newSearchPath(list string) searchPath {
	if list != "" {
		return filepath.SplitList(list)
	}
	return root("").searchPath()
}

// find returns the first of the programs in the first folder that has one.
func (p searchPath) find(programs ...string) (string, error) {
	for _, dir := range p {
		for _, program := range programs {
			file := filepath.Join(dir, program)
			if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return filepath.Abs(file)
			}
		}
	}
	return "", fmt.Errorf("no program %s found", strings.Join(programs, " or "))
}
