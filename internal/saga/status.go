package saga

// Status is an instance's.
type Status string

// The statuses of an instance. COMPENSATED is final, and so is COMPLETED unless an operator has
// the saga reversed.
const (
	Running      Status = "RUNNING"
	Completed    Status = "COMPLETED"
	Compensating Status = "COMPENSATING"
	Compensated  Status = "COMPENSATED"
	ManualAction Status = "MANUAL_ACTION"
)

// Statuses are all statuses of an instance, in the order of its life.
var Statuses = []Status{Running, Completed, Compensating, Compensated, ManualAction}

// Live are the statuses of instances that have not ended.
var Live = []Status{Running, Compensating, ManualAction}

// StepStatus is a step's.
type StepStatus string

// The statuses of a step. A step without a row is PENDING.
const (
	StepPending      StepStatus = "PENDING"
	StepRunning      StepStatus = "RUNNING"
	StepWaiting      StepStatus = "WAITING"
	StepCompleted    StepStatus = "COMPLETED"
	StepFailed       StepStatus = "FAILED"
	StepCompensating StepStatus = "COMPENSATING"
	StepCompensated  StepStatus = "COMPENSATED"
	StepSkipped      StepStatus = "SKIPPED"
)

// Direction tells an action from its compensation.
type Direction string

// The directions, as they stand in the x-direction header.
const (
	Execute    Direction = "execute"
	Compensate Direction = "compensate"
)
