package main

import (
	"fmt"
	"regexp"

	"backstep/internal/amqp"
)

// ownFault are the reasons that lie in the message itself, whatever else is cured: what a lane
// finds unfit, the content type, the body, and what is wrong with an order.
var ownFault = regexp.MustCompile(`^(content_type |body |message_id of |reply (does not decode|has status |to direction )|no x-saga-id header|x-request-id has |the (order|total|quantity) |total_cents |line [0-9]+ |[a-z_.]+ has more than |dead-lettered by the broker: rejected \(its body )`)

// parkedAdvice says what is going on with a parked message and what can be done about it.
func parkedAdvice(s *shownParked) []string {
	id := quote(s.ID)
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if s.Removed {
		a := s.Actions[len(s.Actions)-1]
		say("It is not in %s any more, and here from the audit: %s", amqp.ParkedQueue(s.Queue), pastWords(&a, s.Processed))
		return append(lines, sagaLines(s)...)
	}
	replay := fmt.Sprintf("  backstep parked replay %s --queue %s --reason '…'", id, quote(s.Queue))
	anew := fmt.Sprintf("  backstep parked show %s --body | backstep submit -", id)
	inItself := ownFault.MatchString(s.Reason)
	switch {
	case s.Verdict == wouldReplay && inItself && unasked(&s.parked.Original):
		say("The fault is in the message itself, so a replay cannot help. Whoever sent it has to send it anew, corrected and under a new id.")
	case s.Verdict == wouldReplay && s.misnamed && s.Saga == "":
		say("The fault is in the message itself, so a replay cannot help: there is no saga of the name it has. With the id of the right one:")
		say("  backstep saga cancel ID --reason '…'")
	case s.Verdict == wouldReplay && s.misnamed:
		say("The fault is in the message itself, so a replay cannot help: it names its saga by the request that made the order. This does what it asks for:")
		say("  backstep saga cancel %s --reason '…'", quote(s.SagaID))
	case s.Verdict == wouldReplay && inItself && s.SagaID == "":
		say("The fault is in the message itself, so a replay cannot help. Do it anew, under a new id, with a sed, jq or editor between these two " +
			"that corrects it; an order that is one line of JSON:")
		lines = append(lines, anew)
	case s.Verdict == wouldReplay && inItself:
		say("The fault is in the message itself, so a replay cannot help.")
	case s.Verdict == wouldReplay && s.Death != nil && s.Death.Reason == "rejected":
		say("Somebody may have rejected it by hand, in the management UI, and then it can go on. If a worker did, for text that its database refuses, "+
			"it will again, and the message comes back here. Send it to queue %s again:", s.Queue)
		lines = append(lines, replay)
	case s.Verdict == wouldReplay:
		say("Cure what is named above. Then send it to queue %s again:", s.Queue)
		lines = append(lines, replay)
	case s.Verdict == wouldRepeat:
		say("A replay would change nothing: %s. It says so, and removes the message:", s.Why)
		lines = append(lines, replay)
	case s.Verdict == wouldRefuse:
		say("It cannot be replayed as it is: %s.", s.Why)
		switch {
		case s.Fault != "":
		case s.MessageID == "" && s.parked.ID != "":
			say("With the id that it has here, if nothing it asks for has been done yet:")
			lines = append(lines, replay+" --give-id")
		default:
			say("If it has not been done, do it anew, under a new id; an order that is one line of JSON:")
			lines = append(lines, anew)
		}
	}
	say("If it must never be processed:")
	say("  backstep parked drop %s --queue %s --reason '…'", id, quote(s.Queue))
	return append(lines, sagaLines(s)...)
}

func sagaLines(s *shownParked) []string {
	if s.SagaID == "" {
		return nil
	}
	if s.Saga == "" {
		return []string{fmt.Sprintf("It says that it is for saga %s, which there is not, or not any more.", s.SagaID)}
	}
	return []string{"It belongs to a saga:", "  backstep saga show " + quote(s.SagaID)}
}
