import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** The JDK's own client, as it comes: it offers HTTP/2 with each request. Argument: the API's URL. */
public class AskJava {
    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        HttpClient client = HttpClient.newHttpClient();
        String whole = "{\"model\": \"smol\", \"prompt\": \"One, two,\", \"max_tokens\": 8}";
        String stream = "{\"model\": \"forte\", \"prompt\": \"One, two,\", \"max_tokens\": 8, \"stream\": true}";
        for (String body : new String[] {whole, stream, whole}) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/v1/completions"))
                    .header("Content-Type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString(body))
                    .build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            String text = answer.body();
            boolean isWhole = text.contains("\"usage\"") || text.endsWith("data: [DONE]\n\n");
            System.out.println(answer.version() + " " + answer.statusCode() + " " + isWhole);
        }
    }
}
