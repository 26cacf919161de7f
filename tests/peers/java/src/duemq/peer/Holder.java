package duemq.peer;

import com.alibaba.fastjson.JSONObject;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;

/**
 * Keeps a client instance (its connections and threads) open a moment longer than the producer or consumer on it.
 *
 * <p>The last member of an instance closes it when it shuts down, and in 5.x that takes three seconds every other time,
 * for a thread that polls a queue. A member that is not the last one says good-bye to the broker all the same and
 * returns at once; the instance is closed in the background.
 */
final class Holder {
    private final DefaultMQProducer producer;

    private Holder(DefaultMQProducer producer) {
        this.producer = producer;
    }

    /** Opens the instance that a producer with the same request and handle will be on. */
    static Holder forProducer(JSONObject request, String handle) throws MQClientException {
        return open(new DefaultMQProducer("holder_" + handle, Keys.hook(request)), request, handle);
    }

    /** Opens the instance that a consumer with the same request and handle will be on. */
    static Holder forConsumer(JSONObject request, String handle) throws MQClientException {
        DefaultMQProducer producer = new DefaultMQProducer("holder_" + handle, Keys.hook(request));
        Compat.shareWithConsumer(producer);
        return open(producer, request, handle);
    }

    private static Holder open(DefaultMQProducer producer, JSONObject request, String handle) throws MQClientException {
        Messages.configure(producer, request, handle);
        producer.start();
        return new Holder(producer);
    }

    void closeInBackground() {
        Thread thread = new Thread(producer::shutdown);
        thread.setDaemon(true);
        thread.start();
    }
}
