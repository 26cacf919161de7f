// Apache's Go client as a process: one JSON request a line in, replies and events out (tests/peers/PROTOCOL.md).
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const version = "2.1.2"

// request is what any operation may be given; each uses its part.
type request struct {
	ID                int64          `json:"id"`
	Op                string         `json:"op"`
	Nameserver        string         `json:"nameserver"`
	AccessKey         string         `json:"access_key"`
	SecretKey         string         `json:"secret_key"`
	Group             string         `json:"group"`
	Topic             string         `json:"topic"`
	QueueID           *int           `json:"queue_id"`
	Handle            string         `json:"handle"`
	TimeoutMs         int64          `json:"timeout_ms"`
	Retries           *int           `json:"retries"`
	CompressOver      *int           `json:"compress_over"`
	VIP               bool           `json:"vip"`
	Mode              string         `json:"mode"`
	Messages          []outgoing     `json:"messages"`
	Subscriptions     []subscription `json:"subscriptions"`
	Model             string         `json:"model"`
	Orderly           bool           `json:"orderly"`
	Begin             string         `json:"begin"`
	FailFirst         int32          `json:"fail_first"`
	MaxReconsumeTimes *int32         `json:"max_reconsume_times"`
	Offset            int64          `json:"offset"`
	Expression        string         `json:"expression"`
	Count             int            `json:"count"`
}

type subscription struct {
	Topic      string `json:"topic"`
	Expression string `json:"expression"`
}

type object = map[string]any

// output writes whole lines, from whichever goroutine has one.
type output struct {
	mutex   sync.Mutex
	encoder *json.Encoder
}

func (o *output) write(line object) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if err := o.encoder.Encode(line); err != nil {
		fmt.Fprintln(os.Stderr, "cannot answer:", err)
	}
}

func main() {
	rlog.SetLogLevel("warn") // to standard error
	out := &output{encoder: json.NewEncoder(os.Stdout)}
	producers := newProducers()
	consumers := newConsumers(out.write)
	operations := map[string]func(request) (object, error){
		"hello":           hello,
		"producer_start":  producers.start,
		"producer_stop":   producers.stop,
		"send":            producers.send,
		"consumer_start":  consumers.start,
		"consumer_stop":   consumers.stop,
		"pull":            pull,
		"consumer_offset": consumerOffset,
		"queues":          queues,
	}
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(make([]byte, 1<<20), 64<<20)
	for in.Scan() {
		var r request
		if err := json.Unmarshal(in.Bytes(), &r); err != nil {
			fmt.Fprintln(os.Stderr, "not a request:", err)
			os.Exit(1)
		}
		// A goroutine a request: a send to a broker that is down must not hold up the others.
		go func() {
			operation, known := operations[r.Op]
			if !known {
				operation = func(request) (object, error) { return nil, errors.New("no such operation") }
			}
			result, err := operation(r)
			if err != nil {
				out.write(object{"id": r.ID, "error": failure(err)})
			} else {
				out.write(object{"id": r.ID, "result": result})
			}
		}()
	}
}

func hello(request) (object, error) {
	return object{"client": "go", "version": version}, nil
}

// failure is an error as the caller sees it. The library tells the broker's code in its text only.
func failure(err error) object {
	return object{"type": fmt.Sprintf("%T", err), "message": err.Error()}
}

func resolver(nameserver string) primitive.NsResolver {
	return primitive.NewPassthroughResolver([]string{nameserver})
}
