package handlers

import (
	"log/slog"

	"backstep/internal/saga"
)

// The queues of the order domain: intake, one for each step, and replies of remote steps.
const (
	OrdersQueue    = "orders"
	InventoryQueue = "inventory"
	PaymentQueue   = "payment"
	ShippingQueue  = "shipping"
	RepliesQueue   = "replies"
)

// Queues are all queues a deployment has; each also has its <queue>.parked.
var Queues = []string{OrdersQueue, InventoryQueue, PaymentQueue, ShippingQueue, RepliesQueue}

// NewEngine returns an engine that knows every definition of this package.
func NewEngine(log *slog.Logger) *saga.Engine { return saga.NewEngine(log, PlaceOrder) }

// NewEngineWithGateway is NewEngine for a worker that charges at a gateway; nil is none.
func NewEngineWithGateway(log *slog.Logger, gateway *Gateway) *saga.Engine {
	return saga.NewEngine(log, placeOrder(gateway))
}
